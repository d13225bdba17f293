"""
Compares FlashInfer's two decode kernels, on CUDA cores and on tensor cores. The default of the plugin's option
`decode_kernel` is chosen from its results.

    python benchmarks/flashinfer_decode.py --out DIR [--seconds 400] [--repeats 5]

For each head size, number of query heads per KV head, and shape of a batch, all configurations run in turn on the same
inputs in one process, after a comparison of their results. Times are medians: device time of a `run` between two
events, host time of a `plan`. Failures are reported beside the measurements. Modules are compiled first, in parallel.

It writes flashinfer-decode.json and flashinfer-decode.md into the folder after each case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, frozen
from torch import Tensor

from attnplug_kit.bench import Contender, DeviceClock, LaunchClock, interleaved, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEVICE = "cuda"
PAGE = 16
HEADS = 32
"""The maximum number of query heads; a case uses as many whole groups as fit."""
SHAPES = ((16, 1024), (64, 4096), (256, 1024))
KERNELS = ("cuda_cores", "tensor_cores")
MODES = ("eager", "graph")
_WORKSPACE = 256 * 2**20
_TOLERANCE = 2**-6  # for weighted means near 1, with weights and results rounded to bfloat16


@frozen
class Case:
    """
    A batch of decodes.

    Attributes:
        head_size: The head size.
        group: Query heads per KV head.
        requests: The number of requests.
        length: Keys per request.
        cache: The dtype of the KV cache.
    """

    head_size: int
    group: int
    requests: int
    length: int
    cache: str = "bfloat16"

    @property
    def kv_heads(self) -> int:
        """The number of KV heads."""
        return HEADS // self.group

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.kv_heads * self.group

    @property
    def what(self) -> str:
        """The description of the case."""
        batch = f"{self.requests} requests of {self.length}"
        return f"{batch}, {self.heads}/{self.kv_heads} heads of {self.head_size}, {self.cache}"


def cases() -> Iterator[Case]:
    """Yield the cases; an FP8 KV cache in one shape only."""
    for head_size, group in product((128, 64), (1, 2, 4, 8, 3)):
        for requests, length in SHAPES:
            yield Case(head_size, group, requests, length)
        if head_size == 128:
            yield Case(head_size, group, 64, 4096, "float8_e4m3fn")


@frozen
class Timed:
    """
    The medians of one case, in microseconds, by kernel.

    Attributes:
        case: The case.
        run: Device time of a `run`.
        replay: Device time of a `run` replayed from a CUDA graph.
        plan: Host time of a `plan`.
        replan: Host time of a `plan` for the graph.
        difference: The largest difference between two results.
    """

    case: Case
    run: dict[str, float]
    replay: dict[str, float]
    plan: dict[str, float]
    replan: dict[str, float]
    difference: float

    @property
    def ratio(self) -> float:
        """The time on CUDA cores divided by the time on tensor cores."""
        return self.run["cuda_cores"] / self.run["tensor_cores"]

    @property
    def replayed_ratio(self) -> float:
        """The same ratio in graphs."""
        return self.replay["cuda_cores"] / self.replay["tensor_cores"]


@frozen(eq=False)
class PlannedKernel:
    """
    A kernel that is planned for a case.

    Attributes:
        plan: Plans the case again.
        run: Runs the kernel, or replays its graph.
        output: ``(requests, heads, head_size)``, written by a run.
    """

    plan: Callable[[], object]
    run: Callable[[], object]
    output: Tensor


@frozen(eq=False)
class Inputs:
    """
    The inputs of all configurations.

    Attributes:
        query: ``(requests, heads, head_size)``.
        cache: ``(pages + 1, 2, PAGE, kv_heads, head_size)``.
        pages: indptr, indices and last_page_len, int32; indices on the device, the others on the CPU.
    """

    query: Tensor
    cache: Tensor
    pages: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, case: Case) -> Inputs:
        """Return random inputs on shuffled pages."""
        each = -(-case.length // PAGE)
        count = each * case.requests
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        cache = draw(count + 1, 2, PAGE, case.kv_heads, case.head_size).to(getattr(torch, case.cache))
        indices = 1 + torch.randperm(count, generator=generator, device=DEVICE).int()
        indptr = torch.arange(case.requests + 1, dtype=torch.int32) * each
        last = torch.full((case.requests,), case.length - (each - 1) * PAGE, dtype=torch.int32)
        return cls(draw(case.requests, case.heads, case.head_size), cache, (indptr, indices, last))


def make_kernel(case: Case, inputs: Inputs, kernel: str, workspace: Tensor, *, in_graph: bool) -> PlannedKernel:
    """Return a planned kernel, captured in a graph if `in_graph`."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # noqa: PLC0415 - not needed for `--help`

    buffers: dict[str, Any] = {}
    if in_graph:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        buffers = {name: array.clone().to(DEVICE) for name, array in zip(names, inputs.pages, strict=True)}
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=in_graph, use_tensor_cores=kernel == "tensor_cores", backend="fa2", **buffers
    )
    output = torch.empty_like(inputs.query)

    def plan() -> None:
        wrapper.plan(
            *inputs.pages,
            num_qo_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_size,
            page_size=PAGE,
            sm_scale=case.head_size**-0.5,
            q_data_type=torch.bfloat16,
            kv_data_type=inputs.cache.dtype,
            o_data_type=torch.bfloat16,
        )

    def run() -> None:
        wrapper.run(inputs.query, inputs.cache, out=output)

    plan()
    return PlannedKernel(plan, _captured(run) if in_graph else run, output)


def _captured(run: Callable[[], None]) -> Callable[[], object]:
    from attnplug.contract import capture  # noqa: PLC0415 - its only use

    return capture(run, torch.device(DEVICE))[1]


def measure(case: Case, clocks: tuple[DeviceClock, LaunchClock], workspace: Tensor, repeats: int) -> Timed:
    """
    Measure one case.

    Raises:
        RuntimeError: The results of the kernels differ.
    """
    inputs = Inputs.of(case)
    kernels = {
        f"{kernel} {mode}": make_kernel(case, inputs, kernel, workspace, in_graph=mode == "graph")
        for kernel, mode in product(KERNELS, MODES)
    }
    difference = _difference(list(kernels.values()))
    device, host = clocks
    ran = interleaved({name: Contender(lambda _, one=one: one.run()) for name, one in kernels.items()}, device, repeats)
    planned = interleaved(
        {name: Contender(lambda _, one=one: one.plan()) for name, one in kernels.items()}, host, repeats
    )
    return Timed(case, *(_medians(samples, mode) for samples in (ran, planned) for mode in MODES), difference)


def _medians(samples: Any, mode: str) -> dict[str, float]:
    """Return the microseconds of each kernel, eagerly or in a graph."""
    return {kernel: round(1e6 * median(samples.seconds[f"{kernel} {mode}"]), 2) for kernel in KERNELS}


def _difference(kernels: list[PlannedKernel]) -> float:
    for one in kernels:
        one.output.fill_(float("nan"))
        one.run()
    first = kernels[0].output.float()
    difference = max(float((one.output.float() - first).abs().max()) for one in kernels)
    if not difference <= _TOLERANCE:  # false for NaN
        message = f"the results differ by {difference}"
        raise RuntimeError(message)
    return difference


def compile_all(seconds: float) -> list[str]:
    """Compile all modules of the cases, each in its own process, and return the failures."""
    needed = sorted({(case.head_size, case.cache, kernel) for case, kernel in product(cases(), KERNELS)})
    running = {
        one: subprocess.Popen(  # noqa: S603 - this script
            [sys.executable, __file__, "--compile", *map(str, one)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for one in needed
    }
    start, failed = time.perf_counter(), []
    for one, process in running.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, start + seconds - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        print(f"compiled {one}: {process.returncode}, after {time.perf_counter() - start:.0f} s", flush=True)
        if process.returncode:
            failed.append(f"compiling {one}: {output.decode(errors='replace')[-1000:]}")
    return failed


def _compile(head_size: str, cache: str, kernel: str) -> None:
    case = Case(int(head_size), 4, 2, 40, cache)
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=DEVICE)
    make_kernel(case, Inputs.of(case), kernel, workspace, in_graph=False).run()
    torch.cuda.synchronize()


def advice(timed: list[Timed]) -> list[str]:
    """Return the faster kernel for each head size and group, over all shapes, eager and in graphs."""
    head = ("head size and KV cache", "group", "CUDA cores / tensor cores, eager", "in graphs", "faster")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    groups = sorted({(one.case.head_size, one.case.group, one.case.cache) for one in timed})
    for key in groups:
        of_group = [one for one in timed if (one.case.head_size, one.case.group, one.case.cache) == key]
        eager, graphs = (
            geometric_mean([getattr(one, name) for one in of_group]) for name in ("ratio", "replayed_ratio")
        )
        faster = KERNELS[eager * graphs > 1]
        lines.append(f"| {key[0]}, {key[2]} | {key[1]} | {eager:.2f} | {graphs:.2f} | {faster} |")
    return lines


def page(facts: dict[str, str], timed: list[Timed], failures: list[str]) -> str:
    """Return the results as Markdown."""
    columns = ("run", "replay", "plan", "replan")
    origin = "Written by `benchmarks/flashinfer_decode.py`. Medians in us; CUDA cores, then tensor cores."
    lines = ["# Decode kernels of FlashInfer", "", origin, ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| case | device, eager | device, graph | host, `plan` | host, `plan` for the graph |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for one in timed:
        cells = (" / ".join(f"{getattr(one, name)[kernel]:.4g}" for kernel in KERNELS) for name in columns)
        lines.append(f"| {one.case.what} | {' | '.join(cells)} |")
    if timed:
        lines += ["", *advice(timed)]
    return "\n".join([*lines, "", *(f"- failed: {' '.join(one.split())}" for one in failures), ""])


def main() -> int:
    """Measure as many cases as the time allows."""
    options = _options()
    if options.compile:
        _compile(*options.compile)
        return 0
    import flashinfer  # noqa: PLC0415 - as above

    options.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + options.seconds
    facts = {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, flashinfer-python {flashinfer.__version__}",
        "processor": machine()["processor"],
    }
    failures, timed = compile_all(0.7 * options.seconds), []
    clocks = DeviceClock(), LaunchClock()
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=DEVICE)
    for case in cases():
        if time.perf_counter() > end:
            failures.append(f"{case.what}: not measured: the time is over")
            continue
        try:
            timed.append(measure(case, clocks, workspace, options.repeats))
            print(f"{case.what}: eager {timed[-1].run}, graphs {timed[-1].replay} us", flush=True)
        except Exception as error:  # noqa: BLE001 - the next case may do better
            failures.append(f"{case.what}: {type(error).__name__}: {error}")
            print(failures[-1], flush=True)
        _write(options.out, facts, timed, failures)
    _write(options.out, facts, timed, failures)
    print("\n".join(advice(timed)))
    return 1 if failures else 0


def _write(out: Path, facts: dict[str, str], timed: list[Timed], failures: list[str]) -> None:
    document = {"facts": facts, "timed": [asdict(one) for one in timed], "failures": failures}
    (out / "flashinfer-decode.json").write_text(json.dumps(document, indent=1))
    (out / "flashinfer-decode.md").write_text(page(facts, timed, failures))


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the results; default: the current one")
    parser.add_argument("--seconds", type=float, default=400.0, help="no case starts after this time; default: 400")
    parser.add_argument("--repeats", type=int, default=5, help="fifths of a second per comparison at most; default: 5")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
