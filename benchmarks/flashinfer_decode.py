"""
Compares FlashInfer's two kernels for decoding, on CUDA cores and on tensor cores: the default of the plugin's option
`decode_kernel` follows from it.

    python benchmarks/flashinfer_decode.py --out DIR [--seconds 400] [--repeats 5]

For each head size, number of query heads per KV head, and shape of a batch, all ways run on the same inputs in turn in
one process; their results are compared before. Times are medians: of the device between two events, of the host for a
`plan`. What fails is told beside what was measured. The modules are compiled first, several at once.

It writes flashinfer-decode.json and flashinfer-decode.md into the folder, anew after each case.
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
"""Query heads at most: as many of them as are whole groups."""
SHAPES = ((16, 1024), (64, 4096), (256, 1024))
KERNELS = ("cuda_cores", "tensor_cores")
HOW = ("eager", "graph")
_WORKSPACE = 256 * 2**20
_APART = 2**-6  # a weighted mean of values near 1, rounded to bfloat16, and weights that are rounded too


@frozen
class Case:
    """
    What is decoded.

    Attributes:
        head_size: Size of a head.
        group: Query heads per KV head.
        requests: Requests of the batch.
        length: Keys of each.
        cache: Dtype of the cache.
    """

    head_size: int
    group: int
    requests: int
    length: int
    cache: str = "bfloat16"

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return HEADS // self.group

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def what(self) -> str:
        """The case in words."""
        batch = f"{self.requests} requests of {self.length}"
        return f"{batch}, {self.heads}/{self.kv_heads} heads of {self.head_size}, {self.cache}"


def cases() -> Iterator[Case]:
    """Yield what is measured; an 8-bit cache in one shape alone."""
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
        run: The device's time of a `run`.
        replay: The device's time of a `run` in a graph, planned for graphs.
        plan: The host's time of a `plan`.
        replan: The host's time of a `plan` for the graph.
        apart: The largest difference of two results.
    """

    case: Case
    run: dict[str, float]
    replay: dict[str, float]
    plan: dict[str, float]
    replan: dict[str, float]
    apart: float

    @property
    def ratio(self) -> float:
        """The time on CUDA cores in units of that on tensor cores."""
        return self.run["cuda_cores"] / self.run["tensor_cores"]

    @property
    def replayed_ratio(self) -> float:
        """The same in graphs."""
        return self.replay["cuda_cores"] / self.replay["tensor_cores"]


@frozen(eq=False)
class Way:
    """
    One kernel, planned for one case.

    Attributes:
        plan: Plans.
        run: Runs.
        output: What a run writes.
    """

    plan: Callable[[], object]
    run: Callable[[], object]
    output: Tensor


@frozen(eq=False)
class Inputs:
    """
    What all ways read.

    Attributes:
        query: ``(requests, heads, head_size)``.
        cache: ``(pages + 1, 2, PAGE, kv_heads, head_size)``.
        pages: indptr and last_page_len on the host, indices on the device; int32.
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


def way(case: Case, inputs: Inputs, kernel: str, workspace: Tensor, *, in_graph: bool) -> Way:
    """Return a planned kernel; in a graph its run is a replay."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # noqa: PLC0415 - `--help` does without

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
    return Way(plan, _captured(run) if in_graph else run, output)


def _captured(run: Callable[[], None]) -> Callable[[], object]:
    from attnplug.contract import capture  # noqa: PLC0415 - beside its only use

    return capture(run, torch.device(DEVICE))[1]


def measure(case: Case, clocks: tuple[DeviceClock, LaunchClock], workspace: Tensor, repeats: int) -> Timed:
    """
    Measure one case.

    Raises:
        RuntimeError: The kernels do not compute the same.
    """
    inputs = Inputs.of(case)
    ways = {
        f"{kernel} {how}": way(case, inputs, kernel, workspace, in_graph=how == "graph")
        for kernel, how in product(KERNELS, HOW)
    }
    apart = _apart(list(ways.values()))
    device, host = clocks
    ran = interleaved({name: Contender(lambda _, one=one: one.run()) for name, one in ways.items()}, device, repeats)
    planned = interleaved({name: Contender(lambda _, one=one: one.plan()) for name, one in ways.items()}, host, repeats)
    return Timed(case, *(_medians(found, how) for found in (ran, planned) for how in HOW), apart)


def _medians(samples: Any, how: str) -> dict[str, float]:
    """Return the microseconds of each kernel, eagerly or in a graph."""
    return {kernel: round(1e6 * median(samples.seconds[f"{kernel} {how}"]), 2) for kernel in KERNELS}


def _apart(ways: list[Way]) -> float:
    for one in ways:
        one.output.fill_(float("nan"))
        one.run()
    first = ways[0].output.float()
    apart = max(float((one.output.float() - first).abs().max()) for one in ways)
    if not apart <= _APART:  # NaN is not
        message = f"the results are {apart} apart"
        raise RuntimeError(message)
    return apart


def compile_all(seconds: float) -> list[str]:
    """Compile every module that the cases need, each in a process of its own, and return what failed."""
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
            said, _ = process.communicate(timeout=max(1.0, start + seconds - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        print(f"compiled {one}: {process.returncode}, after {time.perf_counter() - start:.0f} s", flush=True)
        if process.returncode:
            failed.append(f"compiling {one}: {said.decode(errors='replace')[-1000:]}")
    return failed


def _compile(head_size: str, cache: str, kernel: str) -> None:
    case = Case(int(head_size), 4, 2, 40, cache)
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=DEVICE)
    way(case, Inputs.of(case), kernel, workspace, in_graph=False).run()
    torch.cuda.synchronize()


def advice(timed: list[Timed]) -> list[str]:
    """Return for each head size and group which kernel is faster over all shapes, eagerly and in graphs."""
    head = ("head size and cache", "group", "CUDA cores / tensor cores, eager", "in graphs", "faster")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    groups = sorted({(one.case.head_size, one.case.group, one.case.cache) for one in timed})
    for key in groups:
        mine = [one for one in timed if (one.case.head_size, one.case.group, one.case.cache) == key]
        eager, graphs = (geometric_mean([getattr(one, name) for one in mine]) for name in ("ratio", "replayed_ratio"))
        faster = KERNELS[eager * graphs > 1]
        lines.append(f"| {key[0]}, {key[2]} | {key[1]} | {eager:.2f} | {graphs:.2f} | {faster} |")
    return lines


def page(facts: dict[str, str], timed: list[Timed], failures: list[str]) -> str:
    """Return all of it as Markdown."""
    columns = ("run", "replay", "plan", "replan")
    said = "Written by `benchmarks/flashinfer_decode.py`. Medians in us; CUDA cores, then tensor cores."
    lines = ["# Decode kernels of FlashInfer", "", said, ""]
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
    """Measure all cases within the time that there is."""
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
            failures.append(f"{case.what}: no time was left")
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
    parser.add_argument("--seconds", type=float, default=400.0, help="after so many, no further case begins")
    parser.add_argument("--repeats", type=int, default=5, help="at most so many fifths of a second for each comparison")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
