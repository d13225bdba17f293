"""
Compiles the modules of FlashInfer for the kit, the GPU tests and the benchmarks in advance, without a GPU.

    python benchmarks/flashinfer_modules.py [--into DIR] [--variants fa3 fa2] [--kit] [--only STRING] [--list]

FlashInfer compiles a module at its first use, while a GPU is idle. This script compiles all modules in parallel, with
MAX_JOBS files at a time. It writes them to the library's folder of precompiled modules, ``data/aot`` in the installed
package, or to DIR, which can be copied there on another machine. Without a GPU, FLASHINFER_CUDA_ARCH_LIST names the
target: "9.0a" for an H200. Existing modules are kept. A Hopper module takes 12 to 25 core-minutes, another one 1.

A machine without a driver needs libcuda.so as a stub, and where they are not installed the headers of cuRAND: the
variables LIBRARY_PATH and CPATH name their folders.

The names come from the plugin (`attnplug_flashinfer.prebuilt`), for all requests of the kit on compute capability 9.0,
and for the layers of benchmarks and models. FlashInfer and the plugin have to be installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

import attnplug
from attnplug.errors import RequirementsError
from attnplug_flashinfer.prebuilt import needed_modules
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.pairwise import covering_specs
from attnplug_kit.conformance.subject import find_subjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug import Requirements

TARGET = attnplug.Device.cuda("9.0")
_LLAMA: dict[str, Any] = {"head_size": 128, "num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16"}
_GPT_OSS: dict[str, Any] = {"head_size": 64, "num_q_heads": 64, "num_kv_heads": 8, "dtype": "bfloat16", "sinks": True}
_GEMMA: dict[str, Any] = {**_LLAMA, "num_q_heads": 16, "logits_soft_cap": 2.0}
LAYERS: tuple[dict[str, Any], ...] = (
    _LLAMA,
    {**_LLAMA, "head_size": 64},
    {**_LLAMA, "sliding_window": 128},
    {**_LLAMA, "kv_cache_dtype": "fp8_e4m3"},
    {**_LLAMA, "kv_cache_dtype": "fp8_e5m2"},
    _GPT_OSS,
    {**_GPT_OSS, "sliding_window": 128},
    {**_GPT_OSS, "head_size": 128},
    _GEMMA,
    {**_GEMMA, "sliding_window": 128},
)
"""The layers of the benchmarks, of the engine's model, and of the GPU tests."""
KERNELS = ("tensor_cores", "cuda_cores")

_EXTRA = ({"return_lse": True}, {"cascade": True, "return_lse": True}, {"decode_query_len": 2})
"""Requirements that tests of the kit add to its requests. Refused ones need no module."""

UNTYPED = ("page", "cascade")
"""Modules without a dtype in their names: merges, and the cache writes of the benchmarks' direct calls."""

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_PLAIN = re.compile(
    r"batch_(?P<kind>prefill|decode)_with_kv_cache_dtype_q_(?P<query>\w+?)_dtype_kv_(?P<cache>\w+?)_dtype_o_\w+?_"
    r"dtype_idx_i32_head_dim_qk_(?P<size>\d+)_head_dim_vo_\d+_posenc_0_"
    r"use_swa_(?P<window>True|False)_use_logits_cap_(?P<cap>True|False)(?:_f16qk_False)?(?P<hopper>_sm90)?"
)
_SINKS = re.compile(
    r"batch_prefill_attention_sink_(?P<query>\w+?)_swa_(?P<window>True|False)_(?P<kernels>fa[23])_head_(?P<size>\d+)_\d+"
)


@frozen
class Module:
    """
    The parts of a module's name.

    Attributes:
        name: The library's name, or the plugin's for sinks.
        kind: ``"prefill"``, ``"decode"``, ``"sinks"``, or else the name.
        kernels: ``"fa2"`` or ``"fa3"``.
        query: The dtype of queries, by torch's name.
        cache: The dtype of the KV cache, by torch's name.
        head_size: The head size.
        window: Whether it applies a sliding window.
        cap: Whether it applies logit soft-capping.
    """

    name: str
    kind: str
    kernels: str = "fa2"
    query: str = "bfloat16"
    cache: str = "bfloat16"
    head_size: int = 128
    window: bool = False
    cap: bool = False

    @classmethod
    def named(cls, name: str) -> Module:
        """
        Return the module of a name.

        Raises:
            ValueError: The plugin needs no module of that name.
        """
        if name in UNTYPED:
            return cls(name, name)
        if found := _PLAIN.fullmatch(name):
            kernels = "fa3" if found["hopper"] else "fa2"
            query, cache = _DTYPES[found["query"]], _DTYPES[found["cache"]]
            rest = int(found["size"]), found["window"] == "True", found["cap"] == "True"
            return cls(name, found["kind"], kernels, query, cache, *rest)
        if found := _SINKS.fullmatch(name):
            dtype = _DTYPES[found["query"]]
            return cls(name, "sinks", found["kernels"], dtype, dtype, int(found["size"]), found["window"] == "True")
        raise ValueError(f"the plugin needs no module {name!r}")

    def spec(self) -> Any:
        """Return the library's specification of the module. FlashInfer has to be installed."""
        import torch  # noqa: PLC0415 - not needed for `--list`
        from flashinfer.jit import cascade, page  # noqa: PLC0415 - as above
        from flashinfer.jit.attention import modules, variants  # noqa: PLC0415 - as above

        if self.kind in UNTYPED:
            return page.gen_page_module() if self.kind == "page" else cascade.gen_cascade_module()
        query, cache = getattr(torch, self.query), getattr(torch, self.cache)
        form = (query, cache, query, torch.int32, self.head_size, self.head_size)
        if self.kind == "decode":
            return modules.gen_batch_decode_module(*form, 0, self.window, self.cap)
        if self.kind == "prefill":
            return modules.gen_batch_prefill_module(self.kernels, *form, 0, self.window, self.cap, False)  # noqa: FBT003
        extra = (["sink"], ["float"], ["sm_scale"], ["double"])
        declared = variants.attention_sink_decl[self.kernels]
        return modules.gen_customize_batch_prefill_module(
            self.kernels, self.name, *form, *extra, "AttentionSink", declared, use_sliding_window=self.window
        )


def needed(variants: Sequence[str], layers: Sequence[dict[str, Any]] = LAYERS) -> list[str]:
    """
    Return the names of all modules of the variants; the slowest to compile come first.

    Args:
        variants: Of the plugin.
        layers: What is needed beside the requests of the kit.
    """
    found = dict.fromkeys(UNTYPED)
    for variant, kernel in product(variants, KERNELS):
        keywords: dict[str, Any] = {"options": {"flashinfer": {"decode_kernel": kernel}}, "assume_installed": True}
        for requirements in _requirements(variant, layers):
            decision = attnplug.explain(requirements, TARGET, backend=f"flashinfer/{variant}", **keywords)
            if decision.chosen is not None:
                found.update(dict.fromkeys(needed_modules(decision.chosen.agreement, TARGET)))
    return sorted(found, key=lambda name: (Module.named(name).kernels != "fa3", name))


def _requirements(variant: str, layers: Sequence[dict[str, Any]]) -> Iterator[Requirements]:
    (subject,) = find_subjects(f"flashinfer/{variant}", TARGET)
    plain = [attnplug.Requirements(**layer) for layer in layers]
    specs = [spec.requirements() for spec in (*field_values_of(subject).specs.values(), *covering_specs(subject))]
    for requirements in (*plain, *(one for one in specs if one is not None)):
        yield requirements
        for extra in _EXTRA:
            with suppress(RequirementsError):  # contradicts the request
                yield requirements.evolve(**extra)


def compile_into(folder: Path, names: Sequence[str]) -> list[str]:
    """Compile modules, and return the names of those that failed."""
    from flashinfer.jit.core import build_jit_specs  # noqa: PLC0415 - not needed for `--list`

    specs = {name: Module.named(name).spec() for name in names if not _file(folder, name).is_file()}
    wrong = {name: spec.name for name, spec in specs.items() if spec.name != name}
    if wrong:
        raise SystemExit(f"the installed release of FlashInfer names modules differently: {wrong}")
    print(f"{len(specs)} of {len(names)} modules to compile", flush=True)
    if specs:
        try:
            build_jit_specs(list(specs.values()))
        except RuntimeError as error:
            log = str(error)  # of all commands, those that succeeded too
            print(log[max(log.find("FAILED: "), 0) :][:4000], file=sys.stderr)
    for name, spec in specs.items():
        made = Path(spec.get_library_path())
        if made.is_file():
            _file(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(made, _file(folder, name))
    return [name for name in names if not _file(folder, name).is_file()]


def _file(folder: Path, name: str) -> Path:
    return folder / name / f"{name}.so"


def main() -> int:
    """Compile, or list."""
    options = _options()
    layers = () if options.kit else LAYERS
    names = [name for name in needed(options.variants, layers) if not options.only or options.only in name]
    if options.list:
        print("\n".join(names))
        return 0
    failed = compile_into(options.into or _library_folder(), names)
    if failed:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
    return int(bool(failed))


def _library_folder() -> Path:
    from flashinfer.jit import env  # noqa: PLC0415 - not needed with `--into`

    return Path(env.FLASHINFER_AOT_DIR)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="folder of the compiled modules; default: the library's folder")
    parser.add_argument("--variants", nargs="+", default=["fa3", "fa2"], choices=["fa3", "fa2"])
    parser.add_argument("--kit", action="store_true", help="only modules for the requests of the kit")
    parser.add_argument("--only", help="only modules with this in their names")
    parser.add_argument("--list", action="store_true", help="print the names, and compile nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
