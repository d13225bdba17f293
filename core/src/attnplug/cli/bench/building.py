"""What the metadata of a step takes: the batch's assembly, its check, and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug.cli.bench.baseline import baseline_of
from attnplug.cli.bench.choice import Choice
from attnplug.cli.bench.clock import host_clock
from attnplug.cli.bench.finding import Finding, setup_of
from attnplug.cli.bench.interleaved import Contender, interleaved
from attnplug.cli.bench.measurement import Measurement
from attnplug.cli.bench.rig import make_planner
from attnplug.cli.bench.step import decodes, first_prefills, mixed, ragged_decodes
from attnplug.cli.bench.worker import ask
from attnplug.errors import NoBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.cli.bench.clock import Clock
    from attnplug.cli.bench.interleaved import Samples
    from attnplug.cli.bench.rig import Planner
    from attnplug.cli.bench.step import Step
    from attnplug.contract.builder import MetadataBuilder
    from attnplug.contract.slot import GraphSlot

NAME: Final = "build"
REQUESTS: Final = 256
"""The budget is for so many."""

BUDGET: Final = 100.0
"""Microseconds, where the library plans nothing itself."""

STEPS: Final = (
    decodes(REQUESTS, 1024),
    decodes(REQUESTS, 2048),
    ragged_decodes(REQUESTS, 257, 1024),
    mixed(32, 1024, 2, 512),
    first_prefills(4, 512),
)
IN_SLOT: Final = (decodes(REQUESTS, 1024),)


def measure(repeats: int, choice: Choice) -> Finding:
    """Measure in a fresh process."""
    return Finding.from_dict(ask("building", repeats=repeats, choice=choice.to_dict()))


def child(repeats: int, choice: dict[str, Any]) -> dict[str, Any]:
    """
    Measure in this process.

    Raises:
        NoBackendError: Nothing can serve the layer.
        PluginError: The backend fails to load.
    """
    return found(STEPS, IN_SLOT, Choice(**choice), repeats).to_dict()


def found(steps: Sequence[Step], in_slot: Sequence[Step], choice: Choice, repeats: int) -> Finding:
    """
    Measure builds.

    Args:
        steps: Steps that are built eagerly, at least one.
        in_slot: Decodes that are built into a graph slot of their size.
        choice: Backend and device.
        repeats: As for `interleaved`.
    """
    clock = host_clock(choice.settle().type)
    numbers: list[Measurement] = []
    notes: list[str] = []
    planners = [make_planner(step, choice) for step in steps]
    for planner in planners:
        samples = interleaved(_eager(planner), clock, repeats)
        numbers += _told(planner, samples, clock)
        notes += _unsteady(planner.step.what, samples)
    for step in in_slot:
        more, said = _into_slot(step, choice, clock, repeats)
        numbers, notes = numbers + more, notes + said
    return Finding(tuple(numbers), setup_of(planners[0].backend), tuple(notes))


def _eager(planner: Planner) -> dict[str, Contender]:
    """Return what an engine does for a step, and the check alone. A batch is new at each step, and so it is here."""
    from attnplug.batching.draft import BatchDraft  # noqa: PLC0415 - imports torch

    batch, draft = planner.batch(), BatchDraft.of(planner.backend.agreement, planner.backend.device)
    checking = _without_plan(planner.builder)
    return {
        "build": Contender(planner.builder.build, lambda: evolve(batch)),
        "check": Contender(checking.build, lambda: evolve(batch)),
        "draft": Contender(lambda _: planner.drafted(draft)),
    }


def _without_plan(builder: MetadataBuilder) -> MetadataBuilder:
    """Return a builder of the same layers that checks and describes a batch, and plans nothing."""
    from attnplug.contract.builder import MetadataBuilder  # noqa: PLC0415 - imports torch

    own = {"uniform_decodes": builder.uniform_decodes}
    kind: type[MetadataBuilder] = type("Unplanned", (MetadataBuilder,), own)
    return kind(builder.backend, builder.impls, builder.state)


def _told(planner: Planner, samples: Samples, clock: Clock) -> Iterator[Measurement]:
    what, seconds = f"{planner.step.what}, {clock.what}", samples.seconds
    yield Measurement(
        NAME,
        f"{what}: `build`, a plan for one group of layers",
        seconds["build"],
        "us",
        _budget(planner),
        decides=False,
    )
    yield Measurement(
        NAME, f"{what}: of that, the check: `build` of a builder that plans nothing", seconds["check"], "us"
    )
    yield Measurement(NAME, f"{what}: before that, the batch is assembled: `BatchDraft`", seconds["draft"], "us")


def _budget(planner: Planner) -> float | None:
    """Return the budget; None for other numbers of requests, and where a library's own plan is not measured yet."""
    backend = planner.backend.name
    return BUDGET if planner.step.num_reqs == REQUESTS and baseline_of(backend).backend == backend else None


def _into_slot(step: Step, choice: Choice, clock: Clock, repeats: int) -> tuple[list[Measurement], list[str]]:
    """Measure builds into a graph slot, or say why there are none."""
    what = f"{step.what}, into a graph slot"
    try:
        planner = make_planner(step, choice, cudagraph="single_token_decode")
    except NoBackendError as error:
        return [], [f"{NAME}, {what}: not measured, since nothing serves it: {error.allowed}"]
    batch, slot = planner.batch(), _slot(planner)
    build = Contender(lambda batch: planner.builder.build(batch, slot=slot), lambda: evolve(batch))
    samples = interleaved({"build": build}, clock, repeats)
    on_device = planner.backend.device.type != "cpu"
    how = "`build`" if on_device else "`build`, with the work that a device would do for it"
    number = Measurement(
        NAME,
        f"{what}, {clock.what}: {how}",
        samples.seconds["build"],
        "us",
        _budget(planner) if on_device else None,
        decides=False,
    )
    return [number], _unsteady(what, samples)


def _slot(planner: Planner) -> GraphSlot:
    """Return a slot as it is after its capture, of the shortest length that holds the step."""
    from attnplug.contract.graph_key import GraphKey  # noqa: PLC0415 - imports torch

    step, builder, state = planner.step, planner.builder, planner.builder.state
    length = next(length for length in builder.graph_lengths if length >= max(step.seq_lens))
    with state.graph_capture(step.num_reqs):
        slot = state.slot(GraphKey(step.num_reqs, step.num_tokens, 1, length))
        builder.build(slot.dummy_batch(), slot=slot)
    return slot


def _unsteady(what: str, samples: Samples) -> list[str]:
    return [] if samples.steady else [f"{NAME}, {what}: time ran out before each median was known to 1 %"]
