"""
One cell, measured: each candidate is judged, then all are timed in turn.

A candidate runs as deployed: `load`, `build`, `forward`, in pages of random order, after a product of matrices that
replaces what the L2 cache holds, and as a replay of a CUDA graph where a host would use one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from inspect import signature
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import fields, frozen

from attnplug import explain, load, registry
from attnplug.commands import ForeignCode, escaped
from attnplug.contract import GraphShape
from attnplug.errors import AttnplugError, BatchError, NoBackendError, PluginError, RequestError
from attnplug.evidence import MeasuredTime, ProfileEntry, current_versions
from attnplug.manifest import requirement_name
from attnplug.request import FIELDS, names_of_pair
from attnplug_kit.bench import DeviceClock, Target, make_rig
from attnplug_kit.bench.forwarding import replay_of
from attnplug_kit.bench.timing import CallClock, is_steady
from attnplug_kit.oracle import (
    INT8_DTYPES,
    Case,
    Int8Rounding,
    assert_close,
    attend,
    check,
    int8_rounding,
    materialize,
)
from attnplug_kit.tune.deciding import LEAST_ROUNDS, steady_rounds, summary, survivors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

    from torch import Tensor

    from attnplug import Explanation
    from attnplug.negotiation import Candidate
    from attnplug.request import Device, Requirements
    from attnplug_kit.bench import Rig
    from attnplug_kit.bench.timing import Clock
    from attnplug_kit.oracle import Scene
    from attnplug_kit.tune.deciding import Proposal
    from attnplug_kit.tune.grid import Cell

    Lens = tuple[tuple[int, ...], tuple[int, ...]]

_WARM_UP: Final = 3
_SCREENED: Final = 3
_MOST_ROUNDS: Final = 25
_CELL_S: Final = 10.0  # seconds of rounds of a cell; the least number of rounds is measured all the same
_PROBE_SIZE: Final = {"cpu": 256, "cuda": 4096}  # of the probe's matrices
_BUILDS: Final = 9
_PROBE: Final = ""
_OF_CASE: Final = tuple(each.name for each in fields(Case) if each.name in FIELDS and each.name != "block_size")
_OF_ORACLE: Final = tuple(signature(attend).parameters)
_OF_ENGINE: Final = ("paged", "phases", "batch_invariant")

# New and cached tokens of batches that reach the paths of kernels, over several blocks.
_DECODES: Final = ((1, 1, 1), (300, 40, 129))
_PREFILLS: Final = ((70, 33), (0, 200))
_BOTH: Final = ((1, 1, 70, 33), (300, 40, 0, 200))
_CONTIGUOUS: Final = ((70, 33), (0, 0))


class EagerClock:
    """The device's time from the first launch to the end of the last kernel: gaps between launches count."""

    what = "device time, launches included"

    def __init__(self) -> None:
        self._flush = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return the time of a call that finds the device idle and its L2 cache cold."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.mm(self._flush, self._flush)
        torch.cuda.synchronize()
        start.record()
        call(argument)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@frozen(eq=False)
class Clocks:
    """
    The clocks of a device.

    Attributes:
        hidden: For work behind whose kernels the launches hide: graphs, prefills.
        eager: For eager decodes, whose launches a host waits for.
        probe: A fixed piece of work.
        host: For builds, which are work of the host.
    """

    hidden: Clock
    eager: Clock
    probe: Callable[[], object]
    host: Clock


def make_clocks(device_type: str) -> Clocks:
    """Return the clocks of a type of device."""
    kind = "cpu" if device_type == "cpu" else "cuda"
    size = _PROBE_SIZE[kind]
    matrix = torch.ones(size, size, dtype=torch.float32 if kind == "cpu" else torch.bfloat16, device=kind)
    if kind == "cpu":
        return Clocks(CallClock(), CallClock(), lambda: torch.mm(matrix, matrix), CallClock())
    return Clocks(DeviceClock(), EagerClock(), lambda: torch.mm(matrix, matrix), CallClock())


@frozen(eq=False)
class Contestant:
    """A candidate that is ready to be timed."""

    call: Callable[[], object]
    clock: Clock
    in_graph: bool
    build_us: float
    compile_s: float


@frozen(eq=False)
class Measured:
    """
    What came of the candidates of a cell.

    Attributes:
        times: The times of those with a right result.
        rejected: Those whose result was wrong, or whose call failed, with the reason.
        refused: Those that cannot be loaded here, or refuse the batch, with the reason.
    """

    times: Mapping[str, MeasuredTime]
    rejected: Mapping[str, str]
    refused: Mapping[str, str]

    @property
    def reasons(self) -> dict[str, str]:
        """Why candidates have no time, by candidate."""
        return {**self.rejected, **self.refused}


class Tuner:
    """
    Measures cells on one device.

    Args:
        device: The device, one of this process.
        backends: The candidates to measure, as of `attnplug.explain`; None for all that can serve.
        clocks: The clocks; None for those of the device.

    Raises:
        RequestError: A CUDA graph is being captured: serving never measures.
    """

    def __init__(self, device: Device, backends: Sequence[str] | None = None, clocks: Clocks | None = None) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RequestError(
                "tuning was started while a CUDA graph is captured",
                "candidates are measured before an engine serves, by `attnplug tune`",
                "run it in a separate process",
            )
        self.device = device
        self._backends = None if backends is None else list(backends)
        self._clocks = clocks
        self._scenes: dict[tuple[Requirements, int | None, Lens], Scene] = {}
        self._judged: dict[tuple[Requirements, str], str] = {}
        self._refusals: dict[tuple[Requirements, str], str] = {}
        self._found: dict[Cell, dict[str, bool]] = {}
        self._candidates: Mapping[str, Candidate] = {each.id: each for each in registry().candidates()}

    def candidates(self, cell: Cell) -> dict[str, bool]:
        """
        Return the candidates of a cell, best first without measurement, and whether each runs in a CUDA graph there.
        They are found once: one whose probe refuses later remains one of them, and its refusal is part of the entry.

        The built-in backend, which ranks behind all plugins whatever is measured, is one where no other is.
        """
        if cell not in self._found:
            found = self._with_graphs(cell, self._backends)
            plugins = {id_: graph for id_, graph in found.items() if not self._candidates[id_].built_in}
            self._found[cell] = plugins or found
        return self._found[cell]

    def _with_graphs(self, cell: Cell, backends: Sequence[str] | None) -> dict[str, bool]:
        found = dict.fromkeys(self._eligible(cell, "never", backends), False)
        if self.device.type != "cpu" and cell.graph_level != "never":
            found |= dict.fromkeys(self._eligible(cell, cell.graph_level, backends), True)
        return found

    def _eligible(self, cell: Cell, level: str, backends: Sequence[str] | None) -> list[str]:
        found = explain(cell.request(level), self.device, backend=None if backends is None else list(backends))
        able = (verdict.id for verdict in found.verdicts if verdict.status in ("chosen", "eligible"))
        return [id_ for id_ in able if id_ not in found.with_auto]  # those are able, and not permitted

    def objection(self, cell: Cell, pair: str) -> str:
        """Return why two candidates are no routed pair of a cell's layer; empty where they are one."""
        found = explain(cell.request(), self.device, backend=pair)
        return "" if found.chosen is not None else _why_refused(found, pair)

    def libraries(self, id_: str) -> dict[str, str]:
        """Return the versions of what a candidate's kernels are from: its distribution, and what it requires."""
        versions: dict[str, str] = {}
        for each in names_of_pair(id_) or (id_,):
            candidate = self._candidates[each]
            required = candidate.variant.requires if candidate.variant is not None else ()
            names = {requirement_name(one) for one in required} - {"torch"}
            versions |= {name: version for name in sorted(names) if (version := registry().version_of(name))}
            name, _, version = candidate.distribution.rpartition(" ")
            versions |= {name: version} if name and registry().version_of(name) == version else {}
        return versions

    def measure(self, cell: Cell, pair: str = "") -> Measured:
        """Return the times of a cell, of a routed pair too, and why some candidates have none."""
        return self._contest(cell, {**self.candidates(cell), **self._graph_of_pair(cell, pair)})

    def measure_pair(self, cell: Cell, proposal: Proposal) -> Measured:
        """Return the times of a pair and of the candidates beside it, measured in turn."""
        singles = {id_: graph for id_, graph in self.candidates(cell).items() if id_ in proposal.singles}
        return self._contest(cell, {**singles, **self._graph_of_pair(cell, proposal.pair)})

    def _graph_of_pair(self, cell: Cell, pair: str) -> dict[str, bool]:
        """Return whether a pair runs in a CUDA graph; empty where its candidates are no pair for a cell."""
        found = self._with_graphs(cell, [pair]) if pair else {}
        return {id_: graph for id_, graph in found.items() if id_ == pair}

    def entry(self, cell: Cell, found: Measured) -> ProfileEntry:
        """Return the entry of a cell with a time at least."""
        return ProfileEntry(
            measured_on=datetime.now(timezone.utc).date().isoformat(),
            device=self.device,
            versions=current_versions(self.device, registry().version_of),
            requirements=cell.layer,
            phase=cell.phase,
            num_seqs=cell.step.num_reqs,
            kv_len=cell.kv_len,
            query_len=cell.query_len,
            default=next((id_ for id_ in self.candidates(cell) if id_ in found.times), min(found.times)),
            times=found.times,
            rejected=found.rejected,
            refused=found.refused,
        )

    def _contest(self, cell: Cell, ids: Mapping[str, bool]) -> Measured:
        ready: dict[str, Contestant] = {}
        rejected: dict[str, str] = {}
        refused: dict[str, str] = {}
        for id_, in_graph in ids.items():
            with ForeignCode("it failed:") as code:
                refusal = self._refusal(cell.layer, id_)
                problem = "" if refusal else self._judge(cell.layer, id_)
                if refusal:
                    refused[id_] = refusal
                elif problem:
                    rejected[id_] = problem
                else:
                    ready[id_] = self._prepare(cell, id_, in_graph=in_graph)
            if isinstance(code.error, (BatchError, NoBackendError, PluginError)):
                refused[id_] = _one_line(code.error)
            elif code.error is not None:
                rejected[id_] = _one_line(code.error if isinstance(code.error, AssertionError) else code.problem)
        times = self._time(ready) if ready else {}
        ready.clear()
        gc.collect()
        if self.device.type != "cpu":
            torch.cuda.empty_cache()
        return Measured(times, rejected, refused)

    def _refusal(self, layer: Requirements, id_: str) -> str:
        """Return why a candidate cannot be loaded here, such as its probe's reason; empty where it can; once."""
        key = layer, id_
        if key not in self._refusals:
            self._refusals[key] = ""
            wanted = layer.evolve(cudagraph="never")
            try:
                load(wanted, self.device, backend=id_)
            except NoBackendError:  # it was refused for an earlier layer: the verdict has the reason
                self._refusals[key] = _why_refused(explain(wanted, self.device, backend=id_), id_)
            except PluginError as error:
                self._refusals[key] = _one_line(error)
        return self._refusals[key]

    def _judge(self, layer: Requirements, id_: str) -> str:
        """Return how a candidate's results differ from the oracle's on small batches of the layer; once per layer."""
        key = layer, id_
        if key not in self._judged:
            problem = ""
            for lens in _small_batches(layer):
                try:
                    self._check_small(layer, id_, lens)
                except AssertionError as error:
                    problem = f"it computes another result than the oracle: {_one_line(error)}"
                    break
            self._judged[key] = problem  # not where another error was raised: the next cell judges it again
        return self._judged[key]

    def _check_small(self, layer: Requirements, id_: str, lens: Lens) -> None:
        """
        Compare a small batch with the oracle.

        Raises:
            AssertionError: The result differs.
            AttnplugError: The candidate cannot be loaded.
        """
        size = load(layer.evolve(cudagraph="never"), self.device, backend=id_).agreement.block_size
        scene = self._scenes.get((layer, size, lens))
        if scene is None:  # the oracle's result is computed once for all candidates
            own: dict[str, Any] = {name: getattr(layer, name) for name in _OF_CASE}
            own |= {} if size is None else {"block_size": size}
            case = Case(query_lens=lens[0], context_lens=lens[1], **own)
            scene = self._scenes[layer, size, lens] = materialize(case)
        engine = {name: getattr(layer, name) for name in _OF_ENGINE}
        check(load(scene.case.requirements(**engine), self.device, backend=id_), scene)

    def _prepare(self, cell: Cell, id_: str, *, in_graph: bool) -> Contestant:
        level = cell.graph_level if in_graph else "never"
        start = perf_counter()
        kind = "cpu" if self.device.type == "cpu" else None
        rig = make_rig(cell.step, Target(id_, kind), **{**cell.engine, "cudagraph": level})
        output = rig.forward()()
        self._wait()
        compile_s = perf_counter() - start
        check_rows(rig, output, cell.layer)
        build_us = self._build_us(rig)
        call = replay_of(rig) if in_graph else rig.forward()
        clocks = self._clocks or self._make_clocks()
        is_eager_decode = not in_graph and cell.graph_level != "never"
        return Contestant(call, clocks.eager if is_eager_decode else clocks.hidden, in_graph, build_us, compile_s)

    def _make_clocks(self) -> Clocks:
        self._clocks = make_clocks(self.device.type)
        return self._clocks

    def _build_us(self, rig: Rig) -> float:
        """Return the least of a few builds: on a host that is busy with other work, the others measure that."""
        clocks, batch, seconds = self._clocks or self._make_clocks(), rig.batch(), []
        for _ in range(_BUILDS):
            self._wait()
            seconds.append(clocks.host.seconds(rig.builder.build, batch))
        self._wait()
        return 1e6 * min(seconds)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize()

    def _time(self, ready: Mapping[str, Contestant]) -> dict[str, MeasuredTime]:
        clocks = self._clocks or self._make_clocks()
        probe = Contestant(clocks.probe, clocks.hidden, in_graph=False, build_us=0.0, compile_s=0.0)
        gc.collect()
        gc.disable()
        try:
            for each in [*ready.values(), probe] * _WARM_UP:
                _sample(each)
            screened = {id_: [_sample(each) for _ in range(_SCREENED)] for id_, each in ready.items()}
            finalists = survivors(screened)
            series = _rounds({id_: ready[id_] for id_ in finalists}, probe)
        finally:
            gc.enable()
        kept = steady_rounds(series.pop(_PROBE))
        found = {id_: [series[id_][index] for index in kept] for id_ in finalists}
        return {id_: self._measured(id_, each, found.get(id_, screened[id_])) for id_, each in ready.items()}

    def _measured(self, id_: str, contestant: Contestant, samples: Sequence[float]) -> MeasuredTime:
        median, spread = summary(samples)
        return MeasuredTime(
            1e6 * median,
            spread,
            len(samples),
            contestant.in_graph,
            contestant.build_us,
            contestant.compile_s,
            self.libraries(id_),
            tuple(1e6 * sample for sample in samples),
        )


@contextmanager
def compilers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """
    Start processes for `compile_one`, which share the processors: libraries that compile keep the code on disk.

    After an interrupt they are killed, with the compilers that they started: these may take minutes.
    """
    before, share = set(multiprocessing.active_children()), max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_compiler, (share,))
    try:
        yield pool
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - before:
            _kill_group(process)


def compile_one(request: Requirements, device: Device, id_: str) -> str:
    """
    Compile the kernels of a candidate, by a tiny decode and a tiny prefill, as far as they were requested.

    Return why that failed; empty where it did not. Exceptions of its code cannot always be sent to another process.
    """
    lens = {"decode": 1, "prefill": 16}
    with ForeignCode("it failed:") as code:
        load(request, device, backend=id_).warmup([GraphShape(1, lens[each], lens[each]) for each in request.phases])
    return code.problem


def _start_compiler(count: int) -> None:
    """
    Let the compilers of this process, ninja's of FlashInfer among them, use so many processors.

    They write to standard error, since standard output may be a JSON document, and end with the command.
    """
    os.environ.setdefault("MAX_JOBS", str(count))
    os.dup2(2, 1)
    if hasattr(os, "setsid"):  # a group to kill, which an interrupt from a terminal does not reach
        os.setsid()
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


def _kill_group(process: BaseProcess) -> None:
    """Kill a process of `compilers`, and those that it started."""
    with suppress(ProcessLookupError, PermissionError):  # it has no group yet, or ended
        if hasattr(os, "killpg") and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _sample(contestant: Contestant) -> float:
    return contestant.clock.seconds(lambda _: contestant.call(), None)


def _rounds(finalists: Mapping[str, Contestant], probe: Contestant) -> dict[str, list[float]]:
    """
    Measure in turn, the probe first in each round, until the medians are steady; `LEAST_ROUNDS` at least. The order
    moves on by one in each round: what a call leaves behind meets another one.
    """
    order = list(finalists)
    series: dict[str, list[float]] = {_PROBE: [], **{id_: [] for id_ in order}}
    end = perf_counter() + _CELL_S
    for number in range(1, _MOST_ROUNDS + 1):
        series[_PROBE].append(_sample(probe))
        for id_ in order:
            series[id_].append(_sample(finalists[id_]))
        order.append(order.pop(0))
        steady = all(is_steady(series[id_]) for id_ in order)
        if number >= LEAST_ROUNDS and (steady or perf_counter() > end):
            break
    return series


def _small_batches(layer: Requirements) -> tuple[Lens, ...]:
    """Return the batches on which a candidate is judged, of the phases that a layer has."""
    if not layer.paged:
        return (_CONTIGUOUS,)
    if len(layer.phases) > 1:
        return _DECODES, _BOTH
    return (_DECODES,) if "decode" in layer.phases else (_PREFILLS,)


def check_rows(rig: Rig, output: Tensor, layer: Requirements, most: int = 3) -> None:
    """
    Compare the last row of requests with the oracle, where the cache is not of FP8 and no tokens are selected.

    Args:
        rig: The step.
        output: What the backend computed.
        layer: The layer.
        most: How many requests, from the first to the last.

    Raises:
        AssertionError: A row differs.
    """
    step = rig.step
    rounding = _int8_rounding(rig, layer)
    if (rounding is None and layer.kv_cache_dtype not in ("auto", layer.dtype)) or layer.topk is not None:
        return
    byte_weights = rounding is not None and rounding.has_byte_weights
    for request in sorted({number * (step.num_reqs - 1) // max(1, most - 1) for number in range(most)}):
        first, begin = sum(step.query_lens[:request]), sum(step.cached_lens[:request])
        new, old = step.query_lens[request], step.cached_lens[request]
        keys, values = (
            torch.cat([past[begin : begin + old], rows[first : first + new]]).cpu()
            for past, rows in zip(rig.past, (rig.key, rig.value), strict=True)
        )
        row = first + new - 1
        query, largest = rig.query[row : row + 1].cpu(), float(values.abs().max())
        if rounding is not None:
            query, keys, values = rounding.queries(query), rounding.keys(keys), rounding.values(values)
        exact = attend(query, keys, values, scale=step.scale, **_attention(rig, layer))
        got = output[row].view(1, step.num_q_heads, step.size_v)
        try:
            spread = exact.spread, exact.peak
            assert_close(got, exact.output, dtype=got.dtype, scale=largest, byte_weights=byte_weights, spread=spread)
        except AssertionError as error:
            what = f"request {request} of {step.what} differs from the oracle: {error}"
            raise AssertionError(what) from error


def _int8_rounding(rig: Rig, layer: Requirements) -> Int8Rounding | None:
    """Return what the cache makes of the rows, with the scales that it has; None for a dtype without scales per row."""
    if rig.cache is None or layer.kv_cache_dtype not in INT8_DTYPES:
        return None if rig.cache is None else int8_rounding(layer.kv_cache_dtype, ())
    return Int8Rounding(rig.cache["v_scale"].cpu() if "v_scale" in rig.cache else None)


def _attention(rig: Rig, layer: Requirements) -> dict[str, Any]:
    """Return the arguments of the oracle for a layer."""
    own = {name: getattr(layer, name) for name in _OF_CASE}
    sinks, slopes = rig.layer.sinks, rig.layer.alibi_slopes
    return {
        **{name: value for name, value in own.items() if name in _OF_ORACLE},
        "causal": bool(layer.causal),
        "window": Case(query_lens=(1,), context_lens=(0,), **own).window,
        "alibi_slopes": None if slopes is None else slopes.cpu(),
        "sinks": None if sinks is None else sinks.cpu(),
        "block_sparse": None if layer.block_sparse is None else dict(layer.block_sparse),
        "custom_mask": None,
        "attn_bias": None,
    }


def _why_refused(found: Explanation, id_: str) -> str:
    """Return the reasons of a candidate's verdict, in a line."""
    reasons = next((verdict.reasons for verdict in found.verdicts if verdict.id == id_), ())
    return _one_line("; ".join(map(str, reasons)) or "it cannot be loaded")


def _one_line(error: object) -> str:
    """Return the first line of an error, escaped, so that it fits a file and a terminal."""
    text = error.problem if isinstance(error, AttnplugError) else str(error)
    return next((escaped(line.strip())[:300] for line in text.splitlines() if line.strip()), type(error).__name__)
