"""
Compare SGLang's layers on attnplug with a float64 reference, and measure them beside SGLang's own backends.

    python -m tools.pack_sgl_kernel .gpu/sglang        # before, on a machine with a network
    source .gpu/sglang/unpack.sh                       # on the GPU host, which has the kernel libraries of the plugins
    pip install --no-deps -e core -e kit -e hosts/sglang -e plugins/flash_attn -e plugins/flashinfer
    python benchmarks/sglang_host.py REPORT.md [--ours NAME ...] [--beside NAME ...] [--kv-cache-dtype fp8_e4m3]
        [--only TEXT ...] [--repeats 25] [--engines]
    python benchmarks/sglang_host.py REPORT.md --device cpu --tiny

The report has three tables. Errors: the largest difference from the reference, over prefills, chunks behind a prefix,
mixed steps and decodes, eager and replayed from a CUDA graph. Times: medians, and ratios round by round, of a step with
the preparation of its metadata; all backends take turns in one process, over one pool. Engines: the mean difference of
log-probabilities from transformers in float32, and tokens per second; each engine is a process.

A backend that does not run is in the report with its reason, and the script goes on. The exit status is 1 where a
backend of attnplug differs from the reference by more than rounding, or fails other than by a refusal; 3 where SGLang
or the GPU is missing. SGLang's own fa3 needs more of its kernel library than the pack has: install the whole of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

ON_CPU = "SGLANG_HOST_ON_CPU"
sys.path.insert(0, str(Path(__file__).parents[1]))
if "cpu" in sys.argv[1:] or os.environ.get(ON_CPU):
    os.environ[ON_CPU] = "1"  # processes that an engine starts import this module again
    from hosts.sglang.tests import stand_ins

    stand_ins.install_for_engines()

import sglang_engines  # noqa: E402 - SGLang imports what is stood in for
import torch  # noqa: E402 - likewise
from beside import command  # noqa: E402 - likewise
from sglang_rig import Graph, Rig, Variant, make_runner  # noqa: E402 - likewise

from attnplug_kit.bench import Contender, host_clock, interleaved, work_clock  # noqa: E402 - likewise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_kit.bench import Samples

NOT_HERE = 3
DEFAULTS = {
    "cpu": (("attnplug", "attnplug:torch/sdpa"), ("torch_native",)),
    "cuda": (
        ("attnplug:flash_attn/fa3_vllm", "attnplug:flashinfer/fa2", "attnplug:flashinfer/fa3"),
        ("fa3", "flashinfer", "triton"),
    ),
}
"""Device -> backends of attnplug, and of SGLang."""

PLAIN = Variant("plain")
SMALL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
}
LARGE = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
}
LAYERS = 4
PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "flashinfer-python", "vllm", "attnplug", "attnplug-sglang")


def variants(*, tiny: bool) -> tuple[Variant, ...]:
    """Return what is compared; the window and the cap are such that steps of this size show them."""
    window, cap = (11, 1.0) if tiny else (127, 5.0)
    return (PLAIN, Variant("window", window=window), Variant("cap", cap=cap), Variant("sinks", sinks=True))


def works(*, tiny: bool) -> dict[str, tuple[list[int], list[int]]]:
    """Return what is measured: tokens in the pool and new tokens of each request."""
    if tiny:
        return {"decode 4 x 64": ([64] * 4, [1] * 4), "prefill 2 x 16": ([0] * 2, [16] * 2)}
    return {
        "decode 64 x 4,096": ([4096] * 64, [1] * 64),
        "decode 8 x 512": ([512] * 8, [1] * 8),
        "prefill 4 x 2,048": ([0] * 4, [2048] * 4),
        "extend 8 x 128 behind 4,096": ([4096] * 8, [128] * 8),
        "mixed 2,048 + 32 decodes at 4,096": ([0] + [4096] * 32, [2048] + [1] * 32),
    }


class Session:
    """
    One run.

    Args:
        options: Of the command line.
        folder: The model's.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.device, self.tiny = options, options.device, options.tiny
        self.names = [*options.ours, *options.beside]
        tokens = 4096 if self.tiny else 320 * 1024
        self.runner = make_runner(folder, self.device, options.page_size, tokens, options.kv_cache_dtype)
        self.close = 1e-4 if self.runner.dtype == torch.float32 else 3e-2
        self.failed = False

    def _is_wanted(self, row: str) -> bool:
        return not self.options.only or any(text in row for text in self.options.only)

    # Errors

    def errors(self) -> Iterator[list[str]]:
        """Yield the rows of the table of errors."""
        for variant in variants(tiny=self.tiny):
            for name in self.names:
                for part in ("eager", "graph"):
                    row = f"{variant.name}, {part}, {name}"
                    if self._is_wanted(row):
                        yield [variant.name, part, name, self._error(variant, name, part)]
                        print(f"{row} | compared", flush=True)

    def _error(self, variant: Variant, name: str, part: str) -> str:
        is_ours = name in self.options.ours
        try:
            found = (self._eager if part == "eager" else self._graph)(Rig(self.runner, variant), name)
        except Exception as error:  # noqa: BLE001 - the report has the reason, and the next backend may run
            self.failed |= is_ours and not self._is_refused_by_name(error)
            return f"does not run: {_first_line(error)}"
        self.failed |= is_ours and not found <= self.close  # NaN is no number that is close
        return f"{found:.1e}"

    @staticmethod
    def _is_refused_by_name(error: Exception) -> bool:
        from attnplug.errors import NoBackendError, NotNegotiatedError  # noqa: PLC0415 - as SGLang's

        return isinstance(error, (NoBackendError, NotNegotiatedError))

    def _eager(self, rig: Rig, name: str) -> float:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415 - not where it is missing

        backend, scale = rig.backend(name), 1 if self.tiny else 16
        a, b, c = (rig.new(160 * scale) for _ in range(3))
        steps = [
            ([a, b], [17 * scale, 33 * scale], ForwardMode.EXTEND),
            ([b, c], [3, 40 * scale], ForwardMode.EXTEND),
            ([a, b, c], [21 * scale, 1, 1], ForwardMode.MIXED),
            ([c, a, b], [1, 1, 1], ForwardMode.DECODE),
        ]
        worst = 0.0
        for requests, lens, mode in steps:
            step, data = rig.batch(requests, lens, mode), rig.qkv(sum(lens))
            backend.init_forward_metadata(step)
            worst = _larger(worst, _difference(rig.run(backend, step, data), rig.expected(requests, lens, data)))
        return worst

    def _graph(self, rig: Rig, name: str) -> float:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415 - likewise

        backend, scale = rig.backend(name), 1 if self.tiny else 16
        backend.init_cuda_graph_state(4, 4)
        requests, lens = [rig.new(160 * scale) for _ in range(3)], [17 * scale, 33 * scale, 5]
        step, data = rig.batch(requests, lens, ForwardMode.EXTEND), rig.qkv(sum(lens))
        backend.init_forward_metadata(step)
        worst = _difference(rig.run(backend, step, data), rig.expected(requests, lens, data))
        graphs = {size: Graph(rig, backend, size) for size in (4, 2)}
        for count, size in ((3, 4), (2, 2), (1, 2), (2, 4)):
            chosen, fresh = requests[:count], rig.qkv(count)
            for into, own in zip(graphs[size].data, fresh, strict=True):
                for tensor, rows in zip(into, own, strict=True):
                    tensor[:count].copy_(rows)
            graphs[size].prepare(chosen)
            found = graphs[size].replay()
            worst = _larger(worst, _difference(found, rig.expected(chosen, [1] * count, fresh)))
        return worst

    def engines(self) -> Iterator[list[str]]:
        """Yield the rows of the table of engines."""
        for row in sglang_engines.rows(self.names, self._is_wanted, device=self.device, tiny=self.tiny):
            reason = row[2] if row[2].startswith("does not run") else ""
            is_refused = "NoBackendError" in reason or "NotNegotiatedError" in reason
            self.failed |= bool(reason) and row[0] in self.options.ours and not is_refused
            yield row

    # Times

    def times(self) -> Iterator[list[str]]:
        """Yield the rows of the table of times: medians in microseconds, and SGLang's over attnplug's."""
        clocks = {"host": host_clock} if self.device == "cpu" else {"GPU": work_clock, "host": host_clock}
        for work, (cached, new) in works(tiny=self.tiny).items():
            for part in ("eager", "graph") if set(new) == {1} else ("eager",):
                if not self._is_wanted(f"{work}, {part}"):
                    continue
                runs, reasons = self._contenders(cached, new, part)
                for clock, make in clocks.items():
                    samples = interleaved(runs, make(self.device), self.options.repeats) if runs else None
                    yield [work, part, clock, *(self._cell(name, samples, reasons) for name in self.names)]
                    print(f"{work}, {part}, {clock} | measured", flush=True)

    def _cell(self, name: str, samples: Samples | None, reasons: dict[str, str]) -> str:
        if samples is None or name in reasons:
            return f"does not run: {reasons.get(name, '')}"
        found = f"{statistics.median(samples.seconds[name]) * 1e6:.1f}"
        if name in self.options.beside:
            return found
        ratios = [
            f"{statistics.median(samples.ratio(other, name)):.2f} x {other}"
            for other in self.options.beside
            if other not in reasons
        ]
        return f"{found} ({', '.join(ratios)})" if ratios else found

    def _contenders(self, cached: list[int], new: list[int], part: str) -> tuple[dict[str, Contender], dict[str, str]]:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415 - likewise

        kinds = {(1,): ForwardMode.DECODE}
        mode = kinds.get(tuple(set(new)), ForwardMode.MIXED if 1 in new else ForwardMode.EXTEND)
        rig = Rig(self.runner, PLAIN)
        requests = [rig.new(before + count, before) for before, count in zip(cached, new, strict=True)]
        step, data = rig.batch(requests, new, mode), rig.qkv(sum(new))
        runs, reasons = {}, {}
        for name in self.names:
            try:
                backend = rig.backend(name)
                if part == "graph":
                    backend.init_cuda_graph_state(len(requests), len(requests))
                    graph = Graph(rig, backend, len(requests))
                    graph.prepare(requests)
                    runs[name] = Contender(lambda _, graph=graph: (graph.write(), graph.replay()))
                else:
                    runs[name] = Contender(
                        lambda _, backend=backend: (
                            backend.init_forward_metadata(step),
                            rig.run(backend, step, data),
                        )
                    )
                runs[name].call(None)
            except Exception as error:  # noqa: BLE001 - as above
                runs.pop(name, None)
                reasons[name] = _first_line(error)
        return runs, reasons


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    worst = 0.0
    for got, want in pairs:
        worst = _larger(worst, float((got.reshape(len(got), -1)[: len(want)].double() - want).abs().max()))
    return worst


def _larger(one: float, other: float) -> float:
    """Return the larger number, and NaN where either is NaN."""
    return other if other != other or other > one else one  # noqa: PLR0124 - whether it is a number


def _first_line(error: Exception) -> str:
    said = str(getattr(error, "problem", None) or error).strip() or repr(error)
    return f"{type(error).__name__}: {said.splitlines()[0]}"[:200].replace("|", "/")


class Report:
    """
    The report, written anew with each row: a run that is cut off leaves what it has.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.file: Path = options.report
        device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor()
        pool = f"pages of {options.page_size} tokens, KV cache dtype {options.kv_cache_dtype}"
        self.parts = [
            "# SGLang on attnplug",
            f"Device: {device or platform.machine()}. Versions: {', '.join(_versions())}.",
            f"Command: `{command()}`",
            f"A model of {LAYERS} layers, {pool}.",
        ]

    def add(self, title: str, heads: list[str], rows: Iterator[list[str]]) -> None:
        """Add a table, row by row; one without a row is left out."""
        lines = [heads, ["---"] * len(heads)]
        before = list(self.parts)
        for row in rows:
            lines.append(row)
            self.parts = [*before, f"## {title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
            self.file.write_text("\n\n".join(self.parts) + "\n", encoding="utf-8")


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"
    yield f"Python {platform.python_version()}"


def model_folder(options: argparse.Namespace, folder: Path) -> Path:
    """Write the configuration of a model whose layers are measured."""
    import transformers  # noqa: PLC0415 - it imports torchvision, which is stood in for

    transformers.LlamaConfig(
        **(SMALL if options.tiny else LARGE),
        vocab_size=512,
        num_hidden_layers=LAYERS,
        max_position_embeddings=512 if options.tiny else 8192,
        architectures=["LlamaForCausalLM"],
        torch_dtype="float32" if options.device == "cpu" else "bfloat16",
    ).save_pretrained(folder)
    return folder


def main() -> int:
    """Compare, measure, and write the report after each part."""
    options = _options()
    if find_spec("sglang") is None or (options.device == "cuda" and not torch.cuda.is_available()):
        print("not here: SGLang or the GPU is missing", flush=True)
        return NOT_HERE
    from attnplug_sglang import register  # noqa: PLC0415 - imports SGLang

    register()
    report = Report(options)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        session = Session(options, model_folder(options, Path(folder)))
        report.add("Errors", ["variant", "part", "backend", "largest error"], session.errors())
        report.add("Times, us", ["step", "part", "clock", *session.names], session.times())
    if options.engines:
        heads = ["backend", "graphs", "mean difference of log-probabilities", "tokens/s"]
        report.add("Engines", heads, session.engines())
    return int(session.failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the Markdown file to write")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a trial")
    parser.add_argument("--ours", nargs="+", help="names of attnplug in SGLang")
    parser.add_argument("--beside", nargs="*", help="SGLang's own backends")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="rows whose name has one of these texts, such as `plain, graph` or `engine, eager, triton`",
    )
    parser.add_argument("--repeats", type=int, default=25, help="fifths of a second, at most, for each row")
    parser.add_argument("--engines", action="store_true", help="run whole engines, too")
    options = parser.parse_args()
    ours, beside = DEFAULTS[options.device]
    options.ours = list(ours) if options.ours is None else options.ours
    options.beside = list(beside) if options.beside is None else options.beside
    return options


if __name__ == "__main__":
    sys.exit(main())
