"""The section `build`: the metadata of a step, which is its batch's assembly and check, and the backend's plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug import NoBackendError
from attnplug_kit.bench.baseline import baseline_of
from attnplug_kit.bench.processes import measure_in_process
from attnplug_kit.bench.result import Measurement, ResultCollector, SectionResult, setup_of
from attnplug_kit.bench.rig import capture_graph, decodes, first_prefills, make_planner, mixed, ragged_decodes
from attnplug_kit.bench.timing import Contender, host_clock, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnplug.contract import StepBuilder
    from attnplug_kit.bench.baseline import Baseline
    from attnplug_kit.bench.rig import Planner, Step, Target
    from attnplug_kit.bench.timing import Clock, Samples

    Plans = Mapping[str, Callable[[], object]]

NAME: Final = "build"
REQUESTS: Final = 256
"""The number of requests that the budgets are for."""

BUDGET: Final = 100.0
"""Microseconds of a build, where the library plans nothing itself."""

OVER_PLAN: Final = 50.0
"""Microseconds of a build over the library's own plan, where it has one."""

ASSEMBLY_BUDGET: Final = 100.0
"""Microseconds of `BatchAssembler`, which a build waits for."""

_ASSEMBLIES: Final = {
    "assembly": "`BatchAssembler` with requests added one by one",
    "arrays": "`BatchAssembler` with arrays of all requests",
}

STEPS: Final = (
    decodes(REQUESTS, 1024),
    decodes(REQUESTS, 2048),
    ragged_decodes(REQUESTS, 257, 1024),
    mixed(32, 1024, 2, 512),
    first_prefills(4, 512),
)
GRAPH_STEPS: Final = (decodes(REQUESTS, 1024),)
"""Decodes that are built into graph buffers."""


def measure(repeats: int, target: Target) -> SectionResult:
    """Measure in a fresh process."""
    return measure_in_process("building", repeats, target)


def measure_here(repeats: int, target: Target) -> SectionResult:
    """
    Measure in this process.

    Raises:
        NoBackendError: Nothing can serve the layer.
        PluginError: The backend fails to load.
    """
    return measure_steps(STEPS, GRAPH_STEPS, target, repeats)


def measure_steps(steps: Sequence[Step], in_graph: Sequence[Step], target: Target, repeats: int) -> SectionResult:
    """
    Measure builds. A step that fails is recorded, and the others are measured all the same.

    Args:
        steps: Steps that are built eagerly, at least one.
        in_graph: Decodes that are built into graph buffers of their size.
        target: Backend and device.
        repeats: As for `interleaved`.

    Raises:
        Exception: All fail: what the first one raises.
    """
    clock, collector = host_clock(target.prepare().type), ResultCollector(NAME)
    for step in steps:
        collector.add(step.what, partial(measure_step, step, target, clock, repeats))
    for step in in_graph:
        collector.add(_in_graph(step), partial(measure_graph_build, step, target, clock, repeats))
    return collector.result()


def measure_step(step: Step, target: Target, clock: Clock, repeats: int) -> SectionResult:
    """Measure the builds of one step."""
    planner = make_planner(step, target)
    baseline, note = baseline_of(planner.backend.name, target.baseline)
    plans = baseline.plans(planner, captured=False)
    samples = interleaved({**_eager(planner), **_contenders(plans)}, clock, repeats)
    what = f"{step.what}, {clock.what}"
    budget = _budget(planner, plans, baseline)
    assembly = ASSEMBLY_BUDGET if step.num_reqs == REQUESTS else None
    numbers = (
        Measurement(
            NAME, f"{what}: `build`, one group of layers", samples.seconds["build"], "us", budget, decides=False
        ),
        Measurement(NAME, f"{what}: of that, `build` of a builder that plans nothing", samples.seconds["check"], "us"),
        *(
            # Copies to a device are in it.
            Measurement(NAME, f"{what}: before that, {how}", samples.seconds[name], "us", assembly, decides=False)
            for name, how in _ASSEMBLIES.items()
        ),
        *_over_plans(what, samples, plans, step),
    )
    return SectionResult(numbers, setup_of(planner.backend), _notes(note, step.what, samples))


def measure_graph_build(step: Step, target: Target, clock: Clock, repeats: int) -> SectionResult:
    """Measure builds into graph buffers, or note why they are not measured."""
    what = _in_graph(step)
    try:
        planner = make_planner(step, target, cudagraph="single_token_decode")
    except NoBackendError as error:
        return SectionResult(notes=(f"{NAME}, {what}: not measured, since nothing serves it: {error.expected}",))
    batch, (graph, _) = planner.batch(), capture_graph(planner)
    baseline, note = baseline_of(planner.backend.name, target.baseline)
    plans = baseline.plans(planner, captured=True)
    build = Contender(lambda batch: planner.builder.build(batch, graph=graph), lambda: evolve(batch))
    samples = interleaved({"build": build, **_contenders(plans)}, clock, repeats)
    on_device = planner.backend.device.type != "cpu"
    budget = _budget(planner, plans, baseline) if on_device else None
    label = f"{what}, {clock.what}: `build`{'' if on_device else ', with the work that a device would do for it'}"
    number = Measurement(NAME, label, samples.seconds["build"], "us", budget, decides=False)
    numbers = (number, *_over_plans(f"{what}, {clock.what}", samples, plans, step))
    return SectionResult(numbers, setup_of(planner.backend), _notes(note, what, samples))


def _in_graph(step: Step) -> str:
    return f"{step.what}, into graph buffers"


def _contenders(plans: Plans) -> dict[str, Contender]:
    return {name: Contender(lambda _, plan=plan: plan()) for name, plan in plans.items()}  # type: ignore[misc]


def _eager(planner: Planner) -> dict[str, Contender]:
    """Return the calls of an engine for a step, and the check alone. Each sample has a new batch, as each step has."""
    from attnplug.batching import BatchAssembler  # noqa: PLC0415 - imports torch

    agreement, device, arrays = planner.backend.agreement, planner.backend.device, planner.arrays()
    batch, assembler, of_arrays = planner.batch(), *(BatchAssembler.of(agreement, device) for _ in range(2))

    def assemble(_: object) -> object:
        of_arrays.add_many(*arrays)
        return of_arrays.finish()

    return {
        "build": Contender(planner.builder.build, lambda: evolve(batch)),
        "check": Contender(_without_plan(planner.builder).build, lambda: evolve(batch)),
        "assembly": Contender(lambda _: planner.batch(assembler)),
        "arrays": Contender(assemble),
    }


def _without_plan(builder: StepBuilder) -> StepBuilder:
    """Return a builder of the same layers that checks a batch, and plans nothing."""
    from attnplug.contract import MetadataBuilder, StepBuilder  # noqa: PLC0415 - imports torch

    own: dict[str, Any] = {"requires_uniform_decodes": builder.requires_uniform_decodes}
    kind: type[MetadataBuilder] = type("PlansNothing", (MetadataBuilder,), own)
    held = builder.wrapped
    return StepBuilder(kind(held.backend, held.impls, held.state), builder.backend, builder.impls, builder.state)


def _over_plans(what: str, samples: Samples, plans: Plans, step: Step) -> Iterator[Measurement]:
    """Yield what a library's own plan takes, and the build over it; nothing where the library plans nothing."""
    for name in plans:
        yield Measurement(NAME, f"{what}: {name}", samples.seconds[name], "us")
    for name in tuple(plans)[:1]:
        budget = OVER_PLAN if step.num_reqs == REQUESTS else None
        over = samples.over("build", name)
        yield Measurement(NAME, f"{what}: `build` over {name}", over, "us", budget, paired=True, decides=False)


def _budget(planner: Planner, plans: Plans, baseline: Baseline) -> float | None:
    """Return the budget of a build without a library's plan in it; None for other numbers of requests."""
    own = baseline.backend == planner.backend.name
    return BUDGET if own and not plans and planner.step.num_reqs == REQUESTS else None


def _notes(note: str | None, what: str, samples: Samples) -> tuple[str, ...]:
    unsteady = () if samples.steady else (f"{NAME}, {what}: time ran out before each median was known to 1 %",)
    return (*((note,) if note else ()), *unsteady)
