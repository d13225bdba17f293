"""What the replay of a captured layer takes, over that of the raw calls in a graph of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from attnplug import NoBackendError
from attnplug_kit.bench.agreeing import check_same
from attnplug_kit.bench.baseline import baseline_of
from attnplug_kit.bench.clock import work_clock
from attnplug_kit.bench.finding import Finding, setup_of
from attnplug_kit.bench.interleaved import Contender, interleaved
from attnplug_kit.bench.rig import capture_graph, make_rig
from attnplug_kit.bench.step import decodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug_kit.bench.choice import Choice
    from attnplug_kit.bench.rig import Rig
    from attnplug_kit.bench.step import Step

STEPS: Final = (decodes(64, 4096), decodes(256, 1024))
"""Decodes that a slot of their size is captured for."""


def measured(step: Step, choice: Choice, repeats: int) -> Finding:
    """
    Measure the replays of one step, or say why there are none.

    Raises:
        AttnplugError: The two graphs do not compute the same.
    """
    from attnplug_kit.bench.forwarding import NAME, told_large  # noqa: PLC0415 - which measures these steps too

    what = f"{step.what}, replayed from a graph"
    try:
        rig = make_rig(step, choice, cudagraph="single_token_decode")
    except NoBackendError as error:
        return Finding((), {}, (f"{NAME}, {what}: not measured, since nothing serves it: {error.expected}",))
    baseline, note = baseline_of(rig.planner.backend.name)
    ours, raw = replay_of(rig), record(rig, baseline.captured(rig))
    clock = work_clock(rig.planner.backend.device.type)
    check_same(rig, baseline, raw, ours)
    ways = {"raw": Contender(lambda _: raw()), "forward": Contender(lambda _: ours())}
    samples = interleaved(ways, clock, repeats)
    check_same(rig, baseline, raw, ours)
    notes = [note] if note else []
    if not samples.steady:
        notes.append(f"{NAME}, {what}: time ran out before each median was known to 1 %")
    numbers = told_large(f"{what}, {clock.what}", samples, rig, baseline, "`forward` in a slot's graph")
    return Finding(tuple(numbers), setup_of(rig.planner.backend), tuple(notes))


def replay_of(rig: Rig) -> Callable[[], Tensor]:
    """Return a step's layer, captured in a slot of its size with a batch that stands in, and planned for the step."""
    planner = rig.planner
    graph, metadata = capture_graph(planner)
    replay = record(rig, evolve(rig, metadata=metadata).forward())
    planner.builder.build(planner.batch(), graph=graph)
    return replay


def record(rig: Rig, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a recording of calls: it makes them again, and returns what they write."""
    from attnplug.contract import capture  # noqa: PLC0415 - imports torch

    output, replay = capture(call, rig.planner.backend.device)

    def again() -> Tensor:
        replay()
        return output

    return again
