"""What the metadata of a step takes: the batch's assembly, its check, and the plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug import NoBackendError
from attnplug_kit.bench.baseline import baseline_of
from attnplug_kit.bench.choice import Choice
from attnplug_kit.bench.clock import host_clock
from attnplug_kit.bench.finding import Finding, Gathering, setup_of
from attnplug_kit.bench.interleaved import Contender, interleaved
from attnplug_kit.bench.measurement import Measurement
from attnplug_kit.bench.rig import capture_graph, make_planner
from attnplug_kit.bench.step import decodes, first_prefills, mixed, ragged_decodes
from attnplug_kit.bench.worker import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnplug.contract import MetadataBuilder
    from attnplug_kit.bench.baseline import Baseline
    from attnplug_kit.bench.clock import Clock
    from attnplug_kit.bench.interleaved import Samples
    from attnplug_kit.bench.rig import Planner
    from attnplug_kit.bench.step import Step

    Plans = Mapping[str, Callable[[], object]]

NAME: Final = "build"
REQUESTS: Final = 256
"""The budget is for so many."""

BUDGET: Final = 100.0
"""Microseconds, where the library plans nothing itself."""

OVER_PLAN: Final = 50.0
"""Microseconds over the library's own plan, where it has one."""

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


def found(steps: Sequence[Step], in_graph: Sequence[Step], choice: Choice, repeats: int) -> Finding:
    """
    Measure builds. A step that fails is told, and the others are measured all the same.

    Args:
        steps: Steps that are built eagerly, at least one.
        in_graph: Decodes that are built into a graph slot of their size.
        choice: Backend and device.
        repeats: As for `interleaved`.

    Raises:
        Exception: All fail: what the first one raises.
    """
    clock, gathering = host_clock(choice.settle().type), Gathering(NAME)
    for step in steps:
        gathering.add(step.what, partial(measured, step, choice, clock, repeats))
    for step in in_graph:
        gathering.add(f"{step.what}, into a graph slot", partial(measured_in_graph, step, choice, clock, repeats))
    return gathering.finding()


def measured(step: Step, choice: Choice, clock: Clock, repeats: int) -> Finding:
    """Measure the builds of one step."""
    planner = make_planner(step, choice)
    baseline, note = baseline_of(planner.backend.name)
    plans = baseline.plans(planner, captured=False)
    samples = interleaved({**_eager(planner), **_contenders(plans)}, clock, repeats)
    what = f"{step.what}, {clock.what}"
    numbers = [*_told(planner, samples, clock, baseline), *_told_plans(what, samples, plans, step)]
    return Finding(tuple(numbers), setup_of(planner.backend), _notes(note, step.what, samples))


def _contenders(plans: Plans) -> dict[str, Contender]:
    return {name: Contender(lambda _, plan=plan: plan()) for name, plan in plans.items()}  # type: ignore[misc]


def _eager(planner: Planner) -> dict[str, Contender]:
    """Return what an engine does for a step, and the check alone. A batch is new at each step, and so it is here."""
    from attnplug.batching import BatchAssembler  # noqa: PLC0415 - imports torch

    batch, draft = planner.batch(), BatchAssembler.of(planner.backend.agreement, planner.backend.device)
    checking = _without_plan(planner.builder)
    return {
        "build": Contender(planner.builder.build, lambda: evolve(batch)),
        "check": Contender(checking.build, lambda: evolve(batch)),
        "draft": Contender(lambda _: planner.drafted(draft)),
    }


def _without_plan(builder: MetadataBuilder) -> MetadataBuilder:
    """Return a builder of the same layers that checks and describes a batch, and plans nothing."""
    from attnplug.contract import MetadataBuilder  # noqa: PLC0415 - imports torch

    own = {"requires_uniform_decodes": builder.requires_uniform_decodes}
    kind: type[MetadataBuilder] = type("Unplanned", (MetadataBuilder,), own)
    return kind(builder.backend, builder.impls, builder.state)


def _told(planner: Planner, samples: Samples, clock: Clock, baseline: Baseline) -> Iterator[Measurement]:
    what, seconds = f"{planner.step.what}, {clock.what}", samples.seconds
    yield Measurement(
        NAME,
        f"{what}: `build`, a plan for one group of layers",
        seconds["build"],
        "us",
        _budget(planner, samples, baseline),
        decides=False,
    )
    yield Measurement(
        NAME, f"{what}: of that, the check: `build` of a builder that plans nothing", seconds["check"], "us"
    )
    yield Measurement(NAME, f"{what}: before that, the batch is assembled: `BatchAssembler`", seconds["draft"], "us")


def _told_plans(what: str, samples: Samples, plans: Plans, step: Step) -> Iterator[Measurement]:
    """Tell what a library's own plan takes, and the build over it; nothing where the library plans nothing."""
    for name in plans:
        yield Measurement(NAME, f"{what}: {name}", samples.seconds[name], "us")
    for name in tuple(plans)[:1]:
        budget = OVER_PLAN if step.num_reqs == REQUESTS else None
        over = samples.over("build", name)
        yield Measurement(NAME, f"{what}: `build` over {name}", over, "us", budget, paired=True, decides=False)


def _budget(planner: Planner, samples: Samples, baseline: Baseline) -> float | None:
    """Return the budget of a build that has no library's plan in it; None for other numbers of requests."""
    plans_itself = samples.seconds.keys() - {"build", "check", "draft"}
    own = baseline.backend == planner.backend.name
    return BUDGET if own and not plans_itself and planner.step.num_reqs == REQUESTS else None


def measured_in_graph(step: Step, choice: Choice, clock: Clock, repeats: int) -> Finding:
    """Measure builds into a graph slot, or say why there are none."""
    what = f"{step.what}, into a graph slot"
    try:
        planner = make_planner(step, choice, cudagraph="single_token_decode")
    except NoBackendError as error:
        return Finding((), {}, (f"{NAME}, {what}: not measured, since nothing serves it: {error.expected}",))
    batch, (graph, _) = planner.batch(), capture_graph(planner)
    baseline, note = baseline_of(planner.backend.name)
    plans = baseline.plans(planner, captured=True)
    build = Contender(lambda batch: planner.builder.build(batch, graph=graph), lambda: evolve(batch))
    samples = interleaved({"build": build, **_contenders(plans)}, clock, repeats)
    on_device = planner.backend.device.type != "cpu"
    how = "`build`" if on_device else "`build`, with the work that a device would do for it"
    budget = _budget(planner, samples, baseline) if on_device else None
    said = f"{what}, {clock.what}"
    number = Measurement(NAME, f"{said}: {how}", samples.seconds["build"], "us", budget, decides=False)
    numbers = (number, *_told_plans(said, samples, plans, step))
    return Finding(numbers, setup_of(planner.backend), _notes(note, what, samples))


def _notes(note: str | None, what: str, samples: Samples) -> tuple[str, ...]:
    unsteady = () if samples.steady else (f"{NAME}, {what}: time ran out before each median was known to 1 %",)
    return (*((note,) if note else ()), *unsteady)
