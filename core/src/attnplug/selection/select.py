"""`select` and `explain`: from requirements to a decision. No plugin, no kernel library and no torch is imported."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from attnplug._escape import escaped
from attnplug.errors import NoBackendError, RequirementsError, shown
from attnplug.negotiation.evaluation import Evaluation, evaluate
from attnplug.negotiation.matching import Request, build_request
from attnplug.negotiation.pair import MARGIN as PAIR_MARGIN
from attnplug.negotiation.pair import PairEvaluation, evaluate_pairs, measured_pairs, requests_of, routes
from attnplug.negotiation.ranking import AUTO, COMMON_TERMS, Policy, Ranked, is_named, rank
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from attnplug.request.settings import names_of_pair
from attnplug.request.tables import freeze
from attnplug.selection.explanation import Explanation
from attnplug.selection.options import RequestTimes, check_options
from attnplug.selection.process import PROCESS, ProcessState, current_state
from attnplug.selection.scope import Overrides, current_scope, overrides
from attnplug.selection.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from attnplug.request.settings import BackendNames, Options, Settings
    from attnplug.request.torch_values import DeviceLike

_log: Final = logging.getLogger("attnplug")


def select(
    requirements: Requirements,
    device: DeviceLike | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Selection:
    """
    Choose a backend. Decisions are remembered.

    Args:
        requirements: What is requested.
        device: Where it shall run: a `Device`, its text such as ``"cuda:9.0"``, or a `torch.device`. The default is
            this process's device.
        backend: A name: that one, or an error. A list: in that order; ``"auto"`` among them permits any other.
        options: Options by backend, as ``{"flashinfer": {"workspace_mib": 512}}``. `Registry.options` and
            ``attnplug options`` say what options there are.

    Raises:
        NoBackendError: Nothing can serve; it carries every verdict.
        UnknownBackendError: A name is neither installed nor known.
        SettingsError: An option or a setting is wrong.
    """
    # A repeated request has a budget of 0.3 us (with a device 0.5), and each call takes 0.05: no function between here
    # and the dictionary.
    state = PROCESS.state
    if (
        state is not None
        and backend is None
        and options is None
        and type(requirements) is Requirements
        and current_scope() is None
    ):
        if device is None or device is state.own_device:
            found = state.hot.get(requirements)
        elif type(device) is Device or type(device) is str:  # of another type, only the slow path knows what to say
            found = state.hot.get((requirements, device))
        else:
            found = None
        if found is not None and state.registry.generation == state.generation:
            return found
    state, where, settings = context(overrides("the call", backend, options, device))
    explanation = _explain(state, requirements, where, settings)
    if explanation.chosen is None:
        raise no_backend(explanation, settings)
    if settings is state.settings:  # no keyword, no scope that matters: the fast path may repeat it
        if where is state.own_device:
            state.repeat(requirements, explanation.chosen)
        elif isinstance(device, (Device, str)) and device != "current":  # which may be another one later
            state.repeat((requirements, device), explanation.chosen)
    return explanation.chosen


def explain(
    requirements: Requirements,
    device: DeviceLike | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
    assume_installed: bool = False,
) -> Explanation:
    """
    Say what would be chosen and why not the others.

    Args:
        requirements: What is requested.
        device: Where it shall run: a `Device`, its text such as ``"cuda:9.0"``, or a `torch.device`. The default is
            this process's device.
        backend: A name: that one alone. A list: in that order; ``"auto"`` among them permits any other.
        options: Options by backend, as ``{"flashinfer": {"workspace_mib": 512}}``.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there.

    It never raises because nothing can serve: then `Explanation.chosen` is None.

    Raises:
        UnknownBackendError: A name is neither installed nor known.
        SettingsError: An option or a setting is wrong.
    """
    state, where, settings = context(overrides("the call", backend, options, device))
    return _explain(state, requirements, where, settings, assume_installed=assume_installed)


def context(keywords: Overrides) -> tuple[ProcessState, Device, Settings]:
    """Return the state, the device and the settings under which a call with these keywords is decided."""
    state = current_state()
    merged = keywords.over(current_scope())
    return state, merged.device or state.device, merged.over_settings(state.settings)


def _explain(
    state: ProcessState,
    requirements: Requirements,
    device: Device,
    settings: Settings,
    *,
    assume_installed: bool = False,
) -> Explanation:
    if not isinstance(requirements, Requirements):
        raise _not_requirements(requirements)
    key = (requirements, device, settings, _frozen(settings), assume_installed)
    found = state.decisions.get(key)
    if found is None:
        request = build_request(requirements, device, settings)
        new = explain_choice(evaluate_all(state, request, assume_installed=assume_installed))
        found = state.remember(key, new)
        if found is new and not assume_installed:
            log_decision(found)
    return found


@frozen(eq=False)
class Evaluations:
    """
    The evaluations of every candidate for one request, before one is chosen.

    Attributes:
        request: The request.
        ranked: Those that can serve and may be chosen, best first.
        others: The rest, by name.
        assume_installed: Whether missing kernel libraries are supposed to be there.
        times: The measured times for the request.
        profile_notes: What of the profile does not count here, and why.
    """

    request: Request
    ranked: Ranked
    others: tuple[Evaluation, ...]
    assume_installed: bool = False
    times: RequestTimes = field(factory=RequestTimes)
    profile_notes: tuple[str, ...] = ()


def evaluate_all(state: ProcessState, request: Request, *, assume_installed: bool = False) -> Evaluations:
    """
    Evaluate and rank every candidate.

    Raises:
        UnknownBackendError: A listed backend is neither installed nor known.
        SettingsError: An option of an installed backend is unknown or not allowed.
    """
    registry, settings = state.registry, request.settings
    for name in settings.backend:
        registry.check_name(name)
    check_options(registry, settings)
    times = state.profile.times(request, registry.version_of)
    policy = Policy(listed_for(settings.backend, request), times.local, registry.default_orders, times.shipped)
    eligible: list[Evaluation] = []
    others: list[Evaluation] = []
    candidates = registry.candidates(settings, assume_installed=assume_installed)
    for candidate in candidates:
        found = evaluate(candidate, request, state.evidence)
        (eligible if found.serves and policy.admits(candidate) else others).append(found)
    # A local profile ranks first: with one, a pair of the shipped profile alone would be behind all that it measured.
    numbers = times.local or times.shipped
    for name in _pairs(policy.listed, numbers) if routes(request.requirements) else ():
        pair = _evaluate_pair(state, name, request, (*eligible, *others))
        if pair is None:  # what it names is not installed
            continue
        (eligible if pair.serves and policy.admits(pair.candidate) else others).append(pair)
    return Evaluations(
        request,
        rank(eligible, policy),
        tuple(others),
        assume_installed,
        times,
        (*state.profile.notes(request.device, registry.version_of), *_not_routed(numbers)),
    )


def listed_for(names: tuple[str, ...], request: Request) -> tuple[str, ...]:
    """
    Return the listed backends as they count for a request: of a pair the second, where there are no pure decodes to
    route.
    """
    if routes(request.requirements):
        return names
    pairs = ((name, names_of_pair(name)) for name in names)
    return tuple(dict.fromkeys(name if pair is None else pair[1] for name, pair in pairs))


def _pairs(listed: Sequence[str], times: Mapping[str, float]) -> list[str]:
    """Return the pairs that may be chosen: those that are listed, and measured ones where others are permitted."""
    named = [name for name in listed if names_of_pair(name) is not None]
    measured = measured_pairs(times) if times and (not listed or AUTO in listed) else ()
    return [*dict.fromkeys((*named, *measured))]


def _not_routed(times: Mapping[str, float]) -> list[str]:
    """Return which measured pairs are no candidates, a sentence each."""
    pairs = [name for name in sorted(times) if names_of_pair(name) is not None]
    won = measured_pairs(times) if pairs else ()
    return [
        f"the pair {name} was measured, and wins by less than {PAIR_MARGIN:.0%}: nothing is routed"
        for name in pairs
        if name not in won
    ]


def _evaluate_pair(
    state: ProcessState, name: str, request: Request, singles: Sequence[Evaluation]
) -> PairEvaluation | None:
    """Evaluate the candidates that the two names of a pair select, each for its batches, and the pair of them."""
    sides = []
    for one, requested in zip(names_of_pair(name) or (), requests_of(request), strict=False):
        found = [each for each in singles if is_named(each.candidate, one)]
        if requested is not request:
            found = [evaluate(each.candidate, requested, state.evidence) for each in found]
        serving = tuple(each for each in found if each.serves)
        if len(serving) > 1:  # the name of a backend
            times = state.profile.times(requested, state.registry.version_of)
            policy = Policy((), times.local, state.registry.default_orders, times.shipped)
            serving = rank(serving, policy).evaluations
        sides.append((*serving, *(each for each in found if not each.serves)))
    if len(sides) != 2 or not all(sides):
        return None
    pair = evaluate_pairs(request, *sides)
    failure = state.registry.failure_of(pair.candidate.id)
    return pair if failure is None else evolve(pair, objections=(*pair.objections, failure), terms=None)


def explain_choice(found: Evaluations, pick: Evaluation | None = None, because: str = COMMON_TERMS) -> Explanation:
    """
    Choose, and explain the choice with the verdict on every candidate.

    Args:
        found: The evaluations.
        pick: What to choose instead of the first: a candidate with the terms that the layers of a model share.
        because: Why another than the first is chosen.
    """
    request, eligible = found.request, found.ranked.evaluations
    first = pick or next(iter(eligible), None)
    rest = tuple(each for each in eligible if first is None or each.candidate is not first.candidate)
    verdicts = tuple(each.verdict() for each in (*rest, *found.others))
    chosen, behind = None, None
    if first is not None and first.agreement is not None:
        of_roles = first.verdicts() if isinstance(first, PairEvaluation) else ()
        ids = [verdict.id for verdict in of_roles]
        verdicts = (first.verdict(chosen=True), *of_roles, *(each for each in verdicts if each.id not in ids))
        is_best = first.candidate is eligible[0].candidate
        decided_by = found.ranked.decided_by if is_best else because
        behind = found.ranked.runner_up if is_best else next(iter(rest), None)
        chosen = Selection(first.agreement, request.device, verdicts, decided_by, _provenance(request))
    return Explanation(
        request.requirements,
        request.device,
        chosen,
        verdicts,
        found.assume_installed,
        request.settings.backend,
        tuple(request.origins.items()),
        # What can serve, and is among the others all the same, is not permitted.
        tuple(each.candidate.id for each in found.others if each.serves) if request.settings.backend else (),
        tuple(
            each.candidate.id
            for each in (*eligible, *found.others)
            if any(is_named(each.candidate, name) for name in request.settings.backend)
        ),
        "" if behind is None else behind.candidate.id,
        found.ranked.because,
        () if first is None else _to_install(first),
        _least(eligible, first),
        "" if chosen is None or behind is None else found.times.line(chosen.decided_by, chosen.id, behind.candidate.id),
        found.profile_notes,
    )


def _to_install(evaluation: Evaluation) -> tuple[str, ...]:
    """Return the steps that install what was supposed to be there."""
    assumed = evaluation.candidate.assumed
    return () if assumed is None else tuple(assumed.steps())


def _least(eligible: Sequence[Evaluation], chosen: Evaluation | None) -> tuple[str, ...]:
    """Return the candidate that needs the least, and its steps; nothing where that is the chosen one."""
    if chosen is None or chosen.candidate.assumed is None:
        return ()
    least = min(eligible, key=lambda each: len(_to_install(each)))  # of several the best
    fewer = len(_to_install(least)) < len(_to_install(chosen))
    return (least.candidate.id, *_to_install(least)) if fewer else ()


def _provenance(request: Request) -> Mapping[str, str]:
    """Return where the settings that took part come from. A layout in the requirements overrides its setting."""
    sources = request.settings.sources
    if "kv_layout" not in sources or "kv_layout" in request.origins:
        return sources
    return {name: source for name, source in sources.items() if name != "kv_layout"}


def no_backend(explanation: Explanation, settings: Settings, layer: str = "") -> NoBackendError:
    """Return the error that says why nothing can serve."""
    of_layer = f" of layer {layer!r}" if layer else ""
    named = (
        f" among {', '.join(map(repr, settings.backend))} ({settings.sources.get('backend', 'the settings')})"
        if settings.backend
        else ""
    )
    fixes = [f"{verdict.id}: {fix}" for verdict, fix in explanation.fixable()]
    permits_more = explanation.with_auto or (explanation.is_strict and not fixes)
    fixes += ["permit others with 'auto' in the list"] if permits_more else []
    return NoBackendError(
        f"no backend can serve the requirements{of_layer}{named}",
        f"every candidate was evaluated\n{explanation.folded()}",
        "one of these\n    " + "\n    ".join(fixes)
        if fixes
        else "change the model's attention: no candidate serves these model fields",
        explanation,
    )


def _not_requirements(given: object) -> RequirementsError:
    expected = "a request is an attnplug.Requirements"
    if isinstance(given, Selection):
        return RequirementsError(
            f"the decision for {given.id!r} was given as requirements",
            expected,
            "load it with selection.load(), or decide again on selection.requirements",
        )
    return RequirementsError(
        f"requirements={shown(given)} was given", expected, "build one, or read one with Requirements.from_dict"
    )


def log_decision(explanation: Explanation) -> None:
    """Write the one record of a new decision. It carries the Selection as ``record.selection``."""
    chosen = explanation.chosen
    if chosen is None:
        _log.info("No backend can serve %s on %s", explanation.requirements, escaped(str(explanation.device)))
    elif _log.isEnabledFor(logging.INFO):  # what is unverified takes files to read
        unverified = escaped(", ".join(f"{item.field}={item.value}" for item in chosen.unverified))
        _log.info(
            "Selected %s for %s on %s%s",
            chosen.id,
            explanation.requirements,
            escaped(str(explanation.device)),
            f"; not verified there by the conformance kit: {unverified}" if unverified else "",
            extra={"selection": chosen},
        )


def _frozen(settings: Settings) -> Hashable:
    """Return the options, and where everything comes from, which a decision reports too."""
    options = settings.options
    values = (
        (backend, name, type(value), repr(value) if type(value) is float else freeze(value))  # NaN equals nothing
        for backend in sorted(options)
        for name, value in sorted(options[backend].items())
    )
    return (*values, *settings.sources.items())
