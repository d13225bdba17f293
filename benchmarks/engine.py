"""
Compares the paged engine with transformers' own continuous batching: same model, same machine, same run.

    python benchmarks/engine.py [--preset NAME] [--device cuda] [--backend NAME[/variant]] [--rounds 3] [--json]
    python benchmarks/engine.py --requests 1 4 32 --prompt 64 --new 200 --layers 2 --threads 1
    python benchmarks/engine.py --preset 1b --backend flashinfer --also torch --out DIR
    python benchmarks/engine.py --preset 1b --backend flashinfer --through flashinfer --through sdpa
    python benchmarks/engine.py --preset mla --absorbed --out DIR

All configurations decode greedily from the same random prompts, in turns. The time is that from the first request to
the last token; models, KV caches, graphs and a warm-up generation come before. The output has medians, their spread and
the ratio, and the share of equal tokens: with random weights rounding may decide between two tokens. With few requests
of a small model the time is host time. A failure of one configuration is reported, and the others go on.

On a GPU each configuration generates once more, under torch's profiler: `busy` is the share of its decode steps in
which the GPU works. What is missing from 1 is host time that no kernel hides.

With --also the engine runs on another backend too, in the same turns; with --serial without async scheduling, too; with
--absorbed all prefills of latents run absorbed, too. The preset mla has the attention layers of DeepSeek-V3. With
--through transformers' continuous batching runs on a backend of attnplug too, or on an attention of transformers (sdpa,
paged|eager, flash_attention_3). With --out the result is written into that folder after each comparison, as engine.json
and engine.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import shlex
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import transformers
from attrs import asdict, evolve, frozen
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import attnplug
from attnplug_transformers import continuous_batching as on_attnplug
from attnplug_transformers.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_NO_TOKEN = -1
_OWN = ("sdpa", "paged|eager", "paged|sdpa")
"""Attention of transformers that its continuous batching takes, besides FlashAttention."""


@frozen
class Preset:
    """A model and its requests; one with latents of `latent` elements has heads of DeepSeek-V3's proportions."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    requests: int
    prompt: int
    new: int
    dtype: str
    latent: int | None = None

    def model(self, device: str) -> Any:
        """Return the model with random weights."""
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 32768,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": self.dtype,
        }
        torch.manual_seed(0)
        with torch.device(device):
            if self.latent is None:
                made: Any = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=self.head_size))
            else:
                sizes |= {"qk_nope_head_dim": self.head_size, "v_head_dim": self.head_size}
                sizes |= {"kv_lora_rank": self.latent, "q_lora_rank": 3 * self.latent}
                sizes |= {"qk_rope_head_dim": self.head_size // 2, "head_dim": self.head_size // 2}
                # All layers are dense: the experts are not measured.
                made = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, first_k_dense_replace=self.layers))
            return made.to(getattr(torch, self.dtype)).eval()

    def prompts(self) -> list[list[int]]:
        """Return random prompts without a common prefix."""
        source = torch.Generator().manual_seed(1)
        return torch.randint(0, self.vocabulary, (self.requests, self.prompt), generator=source).tolist()


PRESETS = {
    "small": Preset(256, 512, 4, 8, 2, 32, 1024, 32, 64, 32, "float32"),
    "1b": Preset(2048, 8192, 16, 32, 8, 64, 128256, 64, 512, 128, "bfloat16"),
    "small-mla": Preset(256, 512, 2, 8, 8, 128, 1024, 2, 2048, 2, "float32", latent=512),
    "mla": Preset(7168, 18432, 4, 128, 128, 128, 32000, 8, 8192, 32, "bfloat16", latent=512),
}


@frozen
class Timed:
    """One configuration, over all rounds."""

    name: str
    seconds: tuple[float, ...]
    tokens_per_second: float
    about: dict[str, Any]
    busy: float | None


@frozen(eq=False)
class Configuration:
    """One configuration, ready to generate."""

    generate: Callable[[], list[list[int]]]
    about: dict[str, Any]


@contextmanager
def continuous_batching(
    model: Any, preset: Preset, batch_tokens: int, *, automatic: bool = True
) -> Iterator[Callable[[], list[list[int]]]]:
    """Yield a generation through transformers' continuous batching, its manager running already."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: PLC0415 - not in all versions

    pages = -(-(preset.prompt + preset.new) // 256) * preset.requests + preset.requests
    config = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=batch_tokens)
    if hasattr(config, "auto_switch_to_flash"):  # not in all versions, either
        config.auto_switch_to_flash = automatic
    generation = GenerationConfig(max_new_tokens=preset.new, do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    manager.start()

    def generate() -> list[list[int]]:
        names = manager.add_requests(inputs=preset.prompts(), max_new_tokens=preset.new)
        found: dict[str, list[int]] = {}
        while len(found) < preset.requests:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                message = "transformers' continuous batching ended by itself"
                raise RuntimeError(message)
        names = list(names) if names else sorted(found)
        return [found[name] for name in names]

    try:
        yield generate
    finally:
        manager.stop(block=True)


def main() -> int:
    """Run the comparison for each number of requests."""
    options = _options()
    preset = PRESETS[options.preset]
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sizes = {name: getattr(options, name) or getattr(preset, name) for name in ("layers", "prompt", "new")}
    found: list[dict[str, Any]] = []
    for requests in options.requests or [preset.requests]:
        found.append(_compare(options, evolve(preset, requests=requests, **sizes), device))
        print(json.dumps(found[-1]) if options.json else _text(found[-1]), flush=True)
        if options.out is not None:
            _write(options.out, found, shlex.join(["python", "benchmarks/engine.py", *sys.argv[1:]]))
    return int(any(one["failures"] for one in found))


@contextmanager
def attnplug_engine(
    options: Any,
    preset: Preset,
    device: str,
    backend: list[str] | None,
    *,
    serial: bool = False,
    absorbed: bool = False,
) -> Iterator[Configuration]:
    """Yield a generation through the engine."""
    engine = Engine(
        preset.model(device),
        backend=backend,
        max_num_reqs=preset.requests,
        max_num_tokens=max(preset.requests, options.batch_tokens),
        max_seq_len=preset.prompt + preset.new,
        graphs=options.graphs,
        async_scheduling=False if serial else None,
        prefix_caching=False,
    )
    ids = sorted({selection.id for selection in engine.selections.values()})
    about = {"backends": ids, "graphs": engine.num_graphs, "why_eager": engine.why_eager}
    if preset.latent is not None:
        found = sorted({selection.id for selection in engine.prefill_selections.values()})
        about["prefills"] = "absorbed" if absorbed else found or engine.why_absorbed
    if absorbed:
        engine._runner._is_long = None  # noqa: SLF001 - no option of the engine

    def generate() -> list[list[int]]:
        return engine.generate(preset.prompts(), max_new_tokens=preset.new, stop_tokens=())

    try:
        yield Configuration(generate, about)
    finally:
        engine.close()


@contextmanager
def transformers_engine(
    options: Any, preset: Preset, model: Any, through: str | None = None
) -> Iterator[Configuration]:
    """Yield a generation through transformers' continuous batching, on `through`: its attention, or a backend."""
    about = {"version": transformers.__version__}
    with ExitStack() as stack:
        if through in _OWN or (through or "").startswith("flash_attention_"):
            model.set_attn_implementation(through)
        elif through is not None:
            stack.enter_context(on_attnplug(model, backend=[through]))
        tokens = max(preset.requests, options.batch_tokens)
        automatic = through not in _OWN  # or else the manager takes FlashAttention where it is installed
        generate = stack.enter_context(continuous_batching(model, preset, tokens, automatic=automatic))
        yield Configuration(generate, about | {"attention": model.config._attn_implementation})  # noqa: SLF001 - its name


def _compare(options: Any, preset: Preset, device: str) -> dict[str, Any]:
    """Time all configurations in turns, and return the result; one that fails is left out from then on."""
    runs: dict[str, list[float]] = {}
    tokens: dict[str, list[list[int]]] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        ready: dict[str, Configuration] = {}
        for name, opened in _configurations(options, preset, device).items():
            with _reported(name, failures):
                ready[name] = stack.enter_context(opened)
        for turn in range(options.rounds + 1):
            for name in [name for name in ready if name not in failures]:
                with _reported(name, failures):
                    seconds, tokens[name] = _time(ready[name].generate, device)
                    print(f"round {turn}, {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
                    if turn:  # the first round warms up
                        runs.setdefault(name, []).append(seconds)
        busy: dict[str, float | None] = {}
        for name in runs if device == "cuda" else ():
            with _reported(name, failures):
                busy[name] = busy_share(_kernels(ready[name].generate))
    about = {name: one.about for name, one in ready.items()}
    return _found(options, preset, device, about, runs, tokens, busy) | {"failures": failures}


def _configurations(options: Any, preset: Preset, device: str) -> dict[str, AbstractContextManager[Configuration]]:
    found = {"attnplug": attnplug_engine(options, preset, device, options.backend)}
    if options.serial:
        found["attnplug, serial"] = attnplug_engine(options, preset, device, options.backend, serial=True)
    if options.absorbed:
        found["attnplug, absorbed"] = attnplug_engine(options, preset, device, options.backend, absorbed=True)
    for name in options.also:
        found[f"attnplug {name}"] = attnplug_engine(options, preset, device, [name])
    # All models are made before a manager runs: its thread draws from the generator that weights come from.
    for name in options.through:
        found[f"transformers {name}"] = transformers_engine(options, preset, preset.model(device), name)
    return {**found, "transformers": transformers_engine(options, preset, preset.model(device))}


@contextmanager
def _reported(name: str, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the other configurations go on
        failures[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {failures[name]}", file=sys.stderr, flush=True)


def _time(generate: Callable[[], list[list[int]]], device: str) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    tokens = generate()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, tokens


def _kernels(generate: Callable[[], list[list[int]]]) -> list[tuple[float, float]]:
    """Return when each kernel and copy of a generation began and ended, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.time_range.start, event.time_range.end) for event in events]


def busy_share(kernels: list[tuple[float, float]]) -> float | None:
    """
    Return the share of the time from half to nine tenths of a generation, decodes alone, that kernels cover.

    Args:
        kernels: When each began and ended, in any order; they may overlap. None of them gives None.
    """
    if not kernels:
        return None
    first, last = min(start for start, _ in kernels), max(end for _, end in kernels)
    begin, end = first + 0.5 * (last - first), first + 0.9 * (last - first)
    covered, place = 0.0, begin
    for start, stop in sorted(kernels):
        covered += max(0.0, min(stop, end) - max(start, place))
        place = max(place, min(stop, end))
    return covered / (end - begin)


def _found(
    options: Any, preset: Preset, device: str, about: Any, runs: Any, tokens: Any, busy: dict[str, float | None]
) -> dict[str, Any]:
    """Return the result as plain JSON values; ratio and equal tokens compare the first configuration with the last."""
    total = preset.requests * preset.new
    timed = [
        Timed(name, tuple(times), total / median(times), about[name], busy.get(name)) for name, times in runs.items()
    ]
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "attnplug": attnplug.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    both = {"attnplug", "transformers"} <= runs.keys()
    return {
        "name": options.preset,
        "preset": asdict(preset),
        "machine": machine,
        "ratio": timed[0].tokens_per_second / timed[-1].tokens_per_second if both else None,
        "same_tokens": _same(tokens["attnplug"], tokens["transformers"]) / total if both else None,
        "runs": [asdict(one) for one in timed],
    }


def _same(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(a == b for mine, theirs in zip(some, others, strict=True) for a, b in zip(mine, theirs, strict=True))


def _text(found: dict[str, Any]) -> str:
    """Return a comparison as text."""
    preset, lines = found["preset"], [", ".join(f"{name} {value}" for name, value in found["machine"].items())]
    what = f"{preset['requests']} requests of {preset['prompt']} + {preset['new']} tokens, {preset['dtype']}"
    lines.append(f"{found['name']}: {what}")
    for one in found["runs"]:
        spread = f"{min(one['seconds']):.2f} to {max(one['seconds']):.2f} s"
        busy = "" if one["busy"] is None else f"  GPU busy {one['busy']:.2f}"
        lines.append(f"  {one['name']:20} {one['tokens_per_second']:8.0f} tokens/s  ({spread}){busy}  {one['about']}")
    if found["ratio"] is not None:
        lines.append(f"  ratio {found['ratio']:.2f}, {100 * found['same_tokens']:.1f} % of the tokens are equal")
    return "\n".join([*lines, *(f"  failed: {name}: {why}" for name, why in found["failures"].items())])


def _write(out: Path, found: list[dict[str, Any]], command: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "engine.json").write_text(json.dumps(found, indent=1))
    text = "\n\n".join(map(_text, found))
    (out / "engine.md").write_text(f"# The engine beside transformers\n\n    {command}\n\n```text\n{text}\n```\n")


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--backend", action="append", help="as for attnplug.plan; repeatable, in this order")
    parser.add_argument("--also", action="append", default=[], help="run the engine on this backend too; repeatable")
    parser.add_argument(
        "--through",
        action="append",
        default=[],
        help="run transformers' continuous batching on this backend of attnplug, or on this attention, too; repeatable",
    )
    parser.add_argument("--serial", action="store_true", help="run the engine without async scheduling too")
    parser.add_argument("--absorbed", action="store_true", help="run the engine with all prefills absorbed too")
    parser.add_argument("--out", type=Path, help="folder to write the results into")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of one step, for all configurations")
    parser.add_argument("--requests", type=int, nargs="+", help="one comparison for each; default: the preset's")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt; default: the preset's")
    parser.add_argument("--new", type=int, help="tokens that each request generates; default: the preset's")
    parser.add_argument("--layers", type=int, help="layers of the model; default: the preset's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="one document for each comparison, a line each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
