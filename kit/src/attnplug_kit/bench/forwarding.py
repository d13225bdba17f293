"""What a layer takes through the contract, over the raw calls that compute the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attnplug_kit.bench import replaying
from attnplug_kit.bench.agreeing import check_same
from attnplug_kit.bench.baseline import baseline_of
from attnplug_kit.bench.choice import Choice
from attnplug_kit.bench.clock import host_clock, work_clock
from attnplug_kit.bench.finding import Finding, Gathering, setup_of
from attnplug_kit.bench.hollow import hollow
from attnplug_kit.bench.interleaved import Contender, interleaved
from attnplug_kit.bench.measurement import Measurement
from attnplug_kit.bench.rig import LAYER, make_rig
from attnplug_kit.bench.step import decodes, first_prefills, mixed, ragged_decodes
from attnplug_kit.bench.worker import ask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug_kit.bench.baseline import Baseline
    from attnplug_kit.bench.clock import Clock
    from attnplug_kit.bench.interleaved import Samples
    from attnplug_kit.bench.rig import Rig
    from attnplug_kit.bench.step import Step

NAME: Final = "forward"
BUDGET: Final = 10.0
"""Microseconds a layer."""

RATIO: Final = 1.01
"""`forward` in units of the raw calls, where the device is what takes time."""

_FEW: Final = {"num_q_heads": 8, "num_kv_heads": 2, "head_size": 128}
SMALL: Final = (
    first_prefills(4, 16, **_FEW),
    decodes(8, 64, **_FEW),
    ragged_decodes(8, 20, 64, **_FEW),
    mixed(8, 64, 2, 16, **_FEW),
)
"""Steps with so little to compute that the calls themselves are what takes time."""

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
"""Steps with work enough to see what all of it costs together."""


def measure(repeats: int, choice: Choice) -> Finding:
    """Measure in a fresh process."""
    return Finding.from_dict(ask("forwarding", repeats=repeats, choice=choice.to_dict()))


def child(repeats: int, choice: dict[str, Any]) -> dict[str, Any]:
    """
    Measure in this process.

    Raises:
        NoBackendError: Nothing can serve the layer.
        PluginError: The backend fails to load.
        AttnplugError: The two ways do not compute the same.
    """
    chosen = Choice(**choice)
    kind = chosen.settle().type
    works = [(SMALL, host_clock(kind), True), (LARGE["cuda" if kind == "cuda" else "cpu"], work_clock(kind), False)]
    return found(works, chosen, repeats, replaying.STEPS if kind == "cuda" else ()).to_dict()


def found(
    works: Sequence[tuple[Sequence[Step], Clock, bool]],
    choice: Choice,
    repeats: int,
    replayed: Sequence[Step] = (),
) -> Finding:
    """
    Measure steps. One that fails is told, and the others are measured all the same.

    Args:
        works: Steps, their clock, and whether the calls themselves are what takes time.
        choice: Backend and device.
        repeats: As for `interleaved`.
        replayed: Decodes whose graphs are measured besides.

    Raises:
        Exception: All fail: what the first one raises.
    """
    gathering = Gathering(NAME)
    for steps, clock, is_small in works:
        for step in steps:
            gathering.add(step.what, partial(measured, step, choice, clock, repeats, is_small=is_small))
    for step in replayed:
        gathering.add(f"{step.what}, replayed", partial(replaying.measured, step, choice, repeats))
    return gathering.finding()


def measured(step: Step, choice: Choice, clock: Clock, repeats: int, *, is_small: bool) -> Finding:
    """
    Measure one step.

    Raises:
        AttnplugError: The two ways do not compute the same.
    """
    rig = make_rig(step, choice)
    baseline, note = baseline_of(rig.planner.backend.name)
    samples = _sampled(rig, baseline, clock, repeats)
    notes = [note] if note else []
    if not samples.steady:
        notes.append(f"{NAME}, {step.what}: time ran out before each median was known to 1 %")
    tell = _told_small if is_small else told_large
    numbers = tell(f"{step.what}, {clock.what}", samples, rig, baseline)
    return Finding(tuple(numbers), setup_of(rig.planner.backend), tuple(notes))


def _sampled(rig: Rig, baseline: Baseline, clock: Clock, repeats: int) -> Samples:
    """Measure the ways in turn, once it is sure that they compute the same."""
    from attnplug.contract import forward_context  # noqa: PLC0415 - imports torch

    raw, forward, attend, nothing = baseline.layer(rig), rig.forward(), rig.attend(), hollow(rig)
    with forward_context({LAYER: rig.metadata}):
        check_same(rig, baseline, raw, forward, attend)
        samples = interleaved(
            {
                "raw": Contender(lambda _: raw()),
                "forward": Contender(lambda _: forward()),
                "attend": Contender(lambda _: attend()),
                "contract": Contender(lambda _: nothing()),
            },
            clock,
            repeats,
        )
        check_same(rig, baseline, raw, forward, attend)
    return samples


def _told_small(what: str, samples: Samples, rig: Rig, baseline: Baseline) -> Iterator[Measurement]:
    own = rig.planner.backend.name == baseline.backend
    yield Measurement(NAME, f"{what}: {baseline.what}", samples.seconds["raw"], "us")
    yield Measurement(NAME, f"{what}: `forward`, the cache write included", samples.seconds["forward"], "us")
    over = samples.over("forward", "raw")
    budget = BUDGET if own else None
    yield Measurement(NAME, f"{what}: `forward` over the raw calls", over, "us", budget, paired=True, decides=False)
    alone = "the contract's own part: `forward` of a layer that checks its call and computes nothing"
    yield Measurement(NAME, f"{what}: of that, {alone}", samples.seconds["contract"], "us", BUDGET)
    over = samples.over("attend", "forward")
    yield Measurement(NAME, f"{what}: `attend`, the opaque op, over `forward`", over, "us", paired=True)


def told_large(
    what: str, samples: Samples, rig: Rig, baseline: Baseline, call: str = "`forward`"
) -> Iterator[Measurement]:
    """Tell device times: the raw calls, the backend's, and these in units of those."""
    step, backend = rig.step, rig.planner.backend
    own, on_device = backend.name == baseline.backend, backend.device.type != "cpu"
    layer = f"{step.num_q_heads} query and {step.num_kv_heads} KV heads of {step.head_size}"
    yield Measurement(NAME, f"{what}, {layer}: {baseline.what}", samples.seconds["raw"], "ms")
    yield Measurement(NAME, f"{what}, {layer}: {call}", samples.seconds["forward"], "ms")
    ratio, budget = samples.ratio("forward", "raw"), RATIO if own and on_device else None
    said = f"{what}, {layer}: {call} in units of the raw calls"
    yield Measurement(NAME, said, ratio, "x", budget, paired=True, decides=False)
