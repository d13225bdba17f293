"""The section `forward`: a layer through the contract, over direct library calls that compute the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug import NoBackendError
from attnplug_kit.bench.baseline import baseline_of, compare
from attnplug_kit.bench.processes import measure_in_process
from attnplug_kit.bench.result import Measurement, ResultCollector, SectionResult, setup_of
from attnplug_kit.bench.rig import LAYER, capture_graph, decodes, first_prefills, make_rig, mixed, ragged_decodes
from attnplug_kit.bench.timing import Contender, host_clock, interleaved, work_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from attnplug_kit.bench.baseline import Baseline
    from attnplug_kit.bench.rig import Rig, Step, Target
    from attnplug_kit.bench.timing import Clock, Samples

NAME: Final = "forward"
BUDGET: Final = 10.0
"""Microseconds a layer."""

RATIO: Final = 1.01
"""`forward` divided by the direct calls, where the device is the bottleneck."""

_FEW: Final = {"num_q_heads": 8, "num_kv_heads": 2, "head_size": 128}
SMALL: Final = (
    first_prefills(4, 16, **_FEW),
    decodes(8, 64, **_FEW),
    ragged_decodes(8, 20, 64, **_FEW),
    mixed(8, 64, 2, 16, **_FEW),
)
"""Steps with so little to compute that the time is that of the calls."""

LARGE: Final = {
    "cpu": (first_prefills(1, 512), decodes(16, 512), ragged_decodes(16, 128, 512)),
    "cuda": (
        first_prefills(4, 4096),
        decodes(64, 4096),
        decodes(256, 1024),
        ragged_decodes(64, 1024, 4096),
        mixed(64, 4096, 4, 1024),
    ),
}
"""Steps with so much to compute that the time is that of the kernels."""

REPLAY_STEPS: Final = (decodes(64, 4096), decodes(256, 1024))
"""Decodes that are captured in a graph of their size, and replayed."""


def measure(repeats: int, target: Target) -> SectionResult:
    """Measure in a fresh process."""
    return measure_in_process("forwarding", repeats, target)


def measure_here(repeats: int, target: Target) -> SectionResult:
    """
    Measure in this process.

    Raises:
        NoBackendError: Nothing can serve the layer.
        PluginError: The backend fails to load.
        AttnplugError: Backend and direct calls compute different results.
    """
    kind = target.prepare().type
    works = [(SMALL, host_clock(kind), True), (LARGE["cuda" if kind == "cuda" else "cpu"], work_clock(kind), False)]
    return measure_steps(works, target, repeats, REPLAY_STEPS if kind == "cuda" else ())


def measure_steps(
    works: Sequence[tuple[Sequence[Step], Clock, bool]],
    target: Target,
    repeats: int,
    replayed: Sequence[Step] = (),
) -> SectionResult:
    """
    Measure steps. One that fails is recorded, and the others are measured all the same.

    Args:
        works: Steps, their clock, and whether the time is that of the calls themselves.
        target: Backend and device.
        repeats: As for `interleaved`.
        replayed: Decodes whose graphs are measured besides.

    Raises:
        Exception: All fail: what the first one raises.
    """
    collector = ResultCollector(NAME)
    for steps, clock, is_small in works:
        for step in steps:
            collector.add(step.what, partial(measure_step, step, target, clock, repeats, is_small=is_small))
    for step in replayed:
        collector.add(f"{step.what}, replayed", partial(measure_replay, step, target, repeats))
    return collector.result()


def measure_step(
    step: Step, target: Target, clock: Clock, repeats: int, *, is_small: bool, **engine: Any
) -> SectionResult:
    """
    Measure one step.

    Args:
        step: The step.
        target: Backend and device.
        clock: What is measured.
        repeats: As for `interleaved`.
        is_small: Whether the time is that of the calls themselves.
        engine: Fields of the requirements that an engine sets, such as the form of the KV cache.

    Raises:
        AttnplugError: Backend and direct calls compute different results.
    """
    from attnplug.contract import forward_context  # noqa: PLC0415 - imports torch

    rig = make_rig(step, target, **engine)
    baseline, note = baseline_of(rig.backend.name, target.baseline)
    calls = {"forward": rig.forward(), "forward_op": rig.forward_op()}
    with forward_context({LAYER: rig.metadata}):
        samples = _in_turn(rig, baseline, clock, repeats, baseline.layer(rig), calls, noop=noop_backend(rig))
    what = ", ".join((step.what, *(f"{name}={value}" for name, value in engine.items()), clock.what))
    numbers = (_of_calls if is_small else _of_work)(what, samples, rig, baseline)
    return SectionResult(tuple(numbers), setup_of(rig.backend), _notes(note, step.what, samples))


def measure_replay(step: Step, target: Target, repeats: int, **engine: Any) -> SectionResult:
    """
    Measure the replays of one step, whose requests have as many new tokens, or note why they are not measured.

    Args:
        step: The step.
        target: Backend and device.
        repeats: As for `interleaved`.
        engine: Fields of the requirements that an engine sets.

    Raises:
        AttnplugError: The two graphs compute different results.
    """
    what = ", ".join((step.what, *(f"{name}={value}" for name, value in engine.items()), "replayed from a graph"))
    try:
        level = "single_token_decode" if step.is_decode else "uniform_batch"
        rig = make_rig(step, target, cudagraph=level, decode_query_len=step.query_lens[0], **engine)
    except NoBackendError as error:
        return SectionResult(notes=(f"{NAME}, {what}: not measured, since nothing serves it: {error.expected}",))
    baseline, note = baseline_of(rig.backend.name, target.baseline)
    calls, direct = {"forward": replay_of(rig)}, captured(rig, baseline.captured(rig))
    clock = work_clock(rig.backend.device.type)
    samples = _in_turn(rig, baseline, clock, repeats, direct, calls)
    numbers = _of_work(f"{what}, {clock.what}", samples, rig, baseline, "`forward` in a graph")
    return SectionResult(tuple(numbers), setup_of(rig.backend), _notes(note, what, samples))


def _in_turn(
    rig: Rig,
    baseline: Baseline,
    clock: Clock,
    repeats: int,
    direct: Callable[[], Tensor],
    calls: dict[str, Callable[[], Tensor]],
    **others: Callable[[], object],
) -> Samples:
    """Measure direct calls, the backend's and others in turn. The results are compared before and after."""
    compare(rig, baseline, direct, *calls.values())
    everything = {"direct": direct, **calls, **others}
    contenders = {name: Contender(lambda _, call=call: call()) for name, call in everything.items()}  # type: ignore[misc]
    samples = interleaved(contenders, clock, repeats)
    compare(rig, baseline, direct, *calls.values())
    return samples


def noop_backend(rig: Rig) -> Callable[[], None]:
    """Return the forward of a layer that checks its call as always and computes nothing: the contract's own part."""
    from attnplug.contract import LoadedBackend  # noqa: PLC0415 - imports torch

    backend, metadata = rig.backend, rig.metadata
    nothing = {"run": lambda *_: None, "run_sparse": lambda *_: None}
    impl_class: Any = type("NoopImpl", (backend.impl_class,), nothing)
    noop: Any = type("NoopBackend", (type(backend.wrapped),), {"impl_class": impl_class})
    impl = LoadedBackend(noop(backend.agreement, backend.device_properties)).make_impl(rig.layer)
    query, key, value, cache, output = rig.query, rig.key, rig.given_value, rig.cache, rig.output
    forward = impl.forward if rig.indices is None else partial(impl.forward, indices=rig.indices)

    def call() -> None:
        forward(query, key, value, cache, metadata, output)

    return call


def replay_of(rig: Rig) -> Callable[[], Tensor]:
    """Return the replay of a step's layer. It is captured with a dummy batch, and then planned for the step."""
    graph, metadata = capture_graph(rig)
    replay = captured(rig, evolve(rig, metadata=metadata).forward())
    rig.builder.build(rig.batch(), graph=graph)
    return replay


def captured(rig: Rig, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the replay of captured calls, which returns what they write."""
    from attnplug.contract import capture  # noqa: PLC0415 - imports torch

    output, replay = capture(call, rig.backend.device)

    def again() -> Tensor:
        replay()
        return output

    return again


def _of_calls(what: str, samples: Samples, rig: Rig, baseline: Baseline) -> Iterator[Measurement]:
    """Yield the numbers of a step in which the calls themselves take the time."""
    budget = BUDGET if rig.backend.name == baseline.backend else None
    seconds, over = samples.seconds, samples.over("forward", "direct")
    yield Measurement(NAME, f"{what}: {baseline.what}", seconds["direct"], "us")
    yield Measurement(NAME, f"{what}: `forward`, the cache write included", seconds["forward"], "us")
    yield Measurement(NAME, f"{what}: `forward` over direct calls", over, "us", budget, paired=True, decides=False)
    own_part = "of that, the contract's own part: `forward` of a layer that checks its call and computes nothing"
    yield Measurement(NAME, f"{what}: {own_part}", seconds["noop"], "us", BUDGET)
    op = samples.over("forward_op", "forward")
    yield Measurement(NAME, f"{what}: the opaque op over `forward`", op, "us", paired=True)


def _of_work(
    what: str, samples: Samples, rig: Rig, baseline: Baseline, call: str = "`forward`"
) -> Iterator[Measurement]:
    """Yield the numbers of a step in which the work takes the time: direct calls, the backend's, and their ratio."""
    step, backend = rig.step, rig.backend
    what = f"{what}, {step.num_q_heads} query and {step.num_kv_heads} KV heads of {step.head_size}"
    budget = RATIO if backend.name == baseline.backend and backend.device.type != "cpu" else None
    ratio = samples.ratio("forward", "direct")
    yield Measurement(NAME, f"{what}: {baseline.what}", samples.seconds["direct"], "ms")
    yield Measurement(NAME, f"{what}: {call}", samples.seconds["forward"], "ms")
    yield Measurement(NAME, f"{what}: {call} / direct calls", ratio, "x", budget, paired=True, decides=False)


def _notes(note: str | None, what: str, samples: Samples) -> tuple[str, ...]:
    unsteady = () if samples.steady else (f"{NAME}, {what}: time ran out before each median was known to 1 %",)
    return (*((note,) if note else ()), *unsteady)
