"""
From what is installed and what is asked to an Explanation. Pure: the registry, the device and the settings are
arguments.
"""

from __future__ import annotations

import logging
import reprlib
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from attnplug.errors import NoBackendError, RequirementsError
from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.common_cache import as_facts
from attnplug.negotiation.evaluation import Question, graph_level, negotiate
from attnplug.negotiation.fix import find_fix
from attnplug.negotiation.ranking import Policy, Ranked, emulated, rank
from attnplug.negotiation.verdict import Fix, Verdict
from attnplug.request.requirements import Requirements
from attnplug.selection import process
from attnplug.selection.explanation import Explanation
from attnplug.selection.kv_layout import name_origin, name_way_out, pose, provenance
from attnplug.selection.options import check_options, measured, options_of
from attnplug.selection.scope import Overrides, current_scope, overrides
from attnplug.selection.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from attnplug.discovery.probe_refusals import ProbeRefusal
    from attnplug.discovery.registry import Registry
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.common_cache import Terms
    from attnplug.negotiation.unverified import Unverified
    from attnplug.request.device import Device
    from attnplug.request.settings import BackendNames, Options, Settings


@frozen
class Answers:
    """
    Every candidate's answer, before one is chosen.

    Attributes:
        registry: Where they come from.
        question: What they were asked.
        ranked: The candidates that can serve and may be chosen, best first.
        terms: The settled free fields by candidate id.
        others: The verdicts on the rest, by name.
    """

    registry: Registry
    question: Question
    ranked: Ranked
    terms: Mapping[str, Mapping[str, Any]]
    others: tuple[Verdict, ...]


def ask(registry: Registry, question: Question, settings: Settings, *, assume_installed: bool = False) -> Answers:
    """
    Ask every candidate.

    Raises:
        UnknownBackendError: A listed backend is neither installed nor known.
        SettingsError: An option of an installed backend is unknown or not allowed.
    """
    for name in settings.backend:
        registry.resolve(name)
    check_options(registry, settings)
    policy = Policy(settings.backend, measured(settings.profile, question), registry.default_orders)
    able: list[Candidate] = []
    terms: dict[str, Mapping[str, Any]] = {}
    others: list[Verdict] = []
    refusals = registry.refusals
    for candidate in registry.candidates(settings, assume_installed=assume_installed):
        outcome = negotiate(candidate, question) if candidate.variant is not None else None
        if outcome is not None and not outcome.objections and candidate.availability == "ready":
            if candidate.id in refusals:
                refusal = find_refusal(registry, candidate, question, outcome.terms, settings)
                if refusal is not None:
                    others.append(_probed(candidate, refusal))
                    continue
            terms[candidate.id] = outcome.terms
            if policy.admits(candidate):
                able.append(candidate)
            else:
                others.append(_able(registry, candidate, question, outcome.terms, settings))
            continue
        others.append(_unable(registry, candidate, question, settings, () if outcome is None else outcome.objections))
    return Answers(registry, question, rank(able, question, policy), terms, tuple(others))


def decide(
    registry: Registry,
    requirements: Requirements,
    device: Device,
    settings: Settings,
    *,
    assume_installed: bool = False,
) -> Explanation:
    """
    Choose, and say why not the others.

    Raises:
        UnknownBackendError: A listed backend is neither installed nor known.
        SettingsError: An option of an installed backend is unknown or not allowed.
    """
    answers = ask(registry, pose(requirements, device, settings), settings, assume_installed=assume_installed)
    return conclude(answers, settings, assume_installed=assume_installed)


def conclude(
    answers: Answers,
    settings: Settings,
    *,
    terms: Mapping[str, Any] | None = None,
    pick: Candidate | None = None,
    assume_installed: bool = False,
) -> Explanation:
    """
    Turn answers into an explanation.

    Args:
        answers: What the candidates answered.
        settings: The settings that they were asked under.
        terms: Terms to agree on instead of the first that pass (a plan's common ones).
        pick: The candidate to choose instead of the first.
        assume_installed: Recorded in the explanation.
    """
    question, ranked = answers.question, answers.ranked
    first = pick or next(iter(ranked.candidates), None)
    if first is None:
        return _explanation(question, None, answers.others, settings, assume_installed=assume_installed)
    order = (first, *(candidate for candidate in ranked.candidates if candidate is not first))
    agreement = _agree(first, question, answers.terms[first.id] if terms is None else terms, settings)
    verdicts = tuple(
        _able(answers.registry, c, question, answers.terms[c.id], settings, agreement if c is first else None)
        for c in order
    )
    decided_by = ranked.decided_by if first is ranked.candidates[0] else "common block size and layout"
    everyone = verdicts + answers.others
    selection = Selection(agreement, question.device, everyone, decided_by, provenance(question, settings))
    return _explanation(question, selection, everyone, settings, assume_installed=assume_installed)


def _explanation(
    question: Question,
    chosen: Selection | None,
    verdicts: tuple[Verdict, ...],
    settings: Settings,
    *,
    assume_installed: bool,
) -> Explanation:
    return Explanation(
        question.requirements,
        question.device,
        chosen,
        verdicts,
        assume_installed,
        settings.backend,
        tuple(question.origins.items()),
    )


def _able(
    registry: Registry,
    candidate: Candidate,
    question: Question,
    terms: Mapping[str, Any],
    settings: Settings,
    agreement: Agreement | None = None,
) -> Verdict:
    """Return the verdict on a candidate that can serve, and is chosen if it has an agreement already."""
    return Verdict(
        candidate.id,
        "eligible" if agreement is None else "chosen",
        emulated=emulated(candidate, question),
        distribution=candidate.distribution,
        agree=lambda: agreement or _agree(candidate, question, terms, settings),
        find_unverified=lambda agreed: _unverified(registry, candidate, agreed, question.device),
    )


def find_refusal(
    registry: Registry, candidate: Candidate, question: Question, terms: Mapping[str, Any] | None, settings: Settings
) -> ProbeRefusal | None:
    """
    Find what the probe of a candidate has refused in this process.

    Args:
        registry: Which remembers it.
        candidate: The candidate.
        question: What is asked of it.
        terms: What would be agreed on; None where nothing would, so that only what holds of everything is found.
        settings: The settings that it is asked under.
    """
    agreement = None if terms is None else _agree(candidate, question, terms, settings)
    known = registry.refusals.get(candidate.id)
    return None if known is None else known.find(agreement, question.device)


def refused_terms(registry: Registry, candidate: Candidate, question: Question, settings: Settings) -> frozenset[Terms]:
    """Return the (block size, layout) pairs of those agreements on a question that a candidate's probe has refused."""
    refused = (each.agreement for each in registry.refusals.get(candidate.id, ()))
    terms = {(agreed.block_size, agreed.kv_layout) for agreed in refused if agreed is not None}
    return frozenset(
        pair for pair in terms if find_refusal(registry, candidate, question, as_facts(pair), settings) is not None
    )


def _probed(candidate: Candidate, refusal: ProbeRefusal) -> Verdict:
    """Return the verdict on a candidate that could serve, were it not for what its probe has found here."""
    return Verdict(
        candidate.id,
        "refused",
        reasons=(refusal.told,),
        distribution=candidate.distribution,
        find_fix=lambda: Fix(action=refusal.fix),
    )


def _unverified(
    registry: Registry, candidate: Candidate, agreement: Agreement, device: Device
) -> tuple[Unverified, ...]:
    """Compare an agreement with the evidence, which nobody looks at before, so that it decides nothing."""
    from attnplug.evidence.coverage import find_unverified  # noqa: PLC0415 - deciding does without

    return find_unverified(candidate, agreement, device, registry.evidence(candidate))


def _agree(candidate: Candidate, question: Question, terms: Mapping[str, Any], settings: Settings) -> Agreement:
    return Agreement(
        backend=candidate.backend,
        variant=candidate.id.partition("/")[2],
        requirements=question.requirements,
        block_size=terms["block_size"],
        kv_layout=terms["kv_layout"],
        kv_cache_dtype=question.requirements.kv_cache_dtype,
        cudagraph=graph_level(candidate, question),
        options=options_of(candidate.manifest, settings) if candidate.manifest else {},
    )


def _unable(
    registry: Registry, candidate: Candidate, question: Question, settings: Settings, objections: tuple[Any, ...]
) -> Verdict:
    def relaxed(stands: Candidate) -> Candidate:
        return next((c for c in registry.candidates(settings, assume_installed=True) if c.id == stands.id), stands)

    availability = candidate.availability
    status: Any = "refused" if objections and availability in ("ready", "missing_dependency") else availability
    reasons = (*name_origin(objections, question), *candidate.reasons)
    if candidate.id in registry.refusals:
        refusal = find_refusal(registry, candidate, question, None, settings)
        reasons += (refusal.told,) if refusal is not None else ()
    return Verdict(
        candidate.id,
        status,
        reasons=reasons,
        distribution=candidate.distribution,
        find_fix=lambda: _past_the_probe(
            registry, candidate, question, settings, name_way_out(find_fix(candidate, question, relaxed), question)
        ),
    )


def _past_the_probe(registry: Registry, candidate: Candidate, question: Question, settings: Settings, fix: Fix) -> Fix:
    """Return a fix, and where it leads to what the candidate's probe has refused, with the fix of that too."""
    if candidate.id not in registry.refusals or candidate.availability == "broken" or not fix.possible:
        return fix
    changed = Question(*fix.apply(question.requirements, question.device))
    terms = negotiate(candidate, changed).terms or None
    refusal = find_refusal(registry, candidate, changed, terms, settings)
    return fix if refusal is None else evolve(fix, action="; ".join(filter(None, (fix.action, refusal.fix))))


_log = logging.getLogger("attnplug")


def select(
    requirements: Requirements,
    device: Device | str | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Selection:
    """
    Choose a backend. Pure: no plugin, no kernel library and no torch is imported. Decisions are remembered.

    Args:
        requirements: What is asked.
        device: Where it shall run; this process's device by default.
        backend: A name: that one, or an error. A list: in that order; ``"auto"`` among them permits any other.
        options: Options by backend.

    Raises:
        NoBackendError: Nothing can serve; it carries every verdict.
        UnknownBackendError: A name is neither installed nor known.
        SettingsError: An option or a setting is wrong.
    """
    state = process._state  # noqa: SLF001 - the repeated question has a budget of 0.3 us; a call to `current` is a third of it
    if (
        state is not None
        and (device is None or device is state._device)  # noqa: SLF001 - likewise
        and backend is None
        and options is None
        and current_scope() is None
    ):
        found = state.hot.get(requirements) if type(requirements) is Requirements else None
        if found is not None and state.registry.generation == state.generation:
            return found
    return _select(requirements, overrides("the call", backend, options, device))


def explain(
    requirements: Requirements,
    device: Device | str | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
    assume_installed: bool = False,
) -> Explanation:
    """
    Say what would be chosen and why not the others.

    Args:
        requirements: As for `select`.
        device: As for `select`.
        backend: As for `select`.
        options: As for `select`.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there.

    It never raises because nothing can serve: then `Explanation.chosen` is None.

    Raises:
        UnknownBackendError: A name is neither installed nor known.
        SettingsError: An option or a setting is wrong.
    """
    asked = overrides("the call", backend, options, device).over(current_scope())
    state = process.current()
    return _explain(
        state,
        requirements,
        asked.device or state.device,
        asked.over_settings(state.settings),
        assume_installed=assume_installed,
    )


def context(asked: Overrides) -> tuple[process.State, Device, Settings]:
    """Return the state, the device and the settings that a call with these keywords is decided on."""
    state = process.current()
    merged = asked.over(current_scope())
    return state, merged.device or state.device, merged.over_settings(state.settings)


def no_backend(explanation: Explanation, settings: Settings, layer: str = "") -> NoBackendError:
    """Return the error that says why nothing can serve."""
    whose = f" of layer {layer!r}" if layer else ""
    named = (
        f" among {', '.join(map(repr, settings.backend))} ({settings.sources.get('backend', 'the settings')})"
        if settings.backend
        else ""
    )
    offered = [v for v in explanation.verdicts if v.fix is not None and v.fix.possible]
    permitted = [v for v in offered if {v.id, v.id.partition("/")[0]} & set(settings.backend)]
    here = [v for v in offered if v.status != "absent"] or [v for v in offered if v.fix and v.fix.install]
    ways = [f"{verdict.id}: {verdict.fix}" for verdict in permitted or here]
    ways += (
        ["permit others with 'auto' in the list"]
        if settings.backend and any(v.status == "eligible" for v in explanation.verdicts)
        else []
    )
    return NoBackendError(
        f"no backend can serve the requirements{whose}{named}",
        f"every candidate was asked\n{explanation}",
        "one of these\n    " + "\n    ".join(ways)
        if ways
        else "change the model's attention: no candidate serves these model fields",
        explanation,
    )


def _select(requirements: Requirements, asked: Overrides) -> Selection:
    state, device, settings = context(asked)
    explanation = _explain(state, requirements, device, settings)
    if explanation.chosen is None:
        raise no_backend(explanation, settings)
    if settings is state.settings and state.is_own(device):
        state.hot[requirements] = explanation.chosen
    return explanation.chosen


def _explain(
    state: process.State,
    requirements: Requirements,
    device: Device,
    settings: Settings,
    *,
    assume_installed: bool = False,
) -> Explanation:
    if not isinstance(requirements, Requirements):
        raise _no_question(requirements)
    key = (requirements, device, settings, _frozen(settings), assume_installed)
    found = state.decisions.get(key)
    if found is None:
        found = decide(state.registry, requirements, device, settings, assume_installed=assume_installed)
        if state.remember(key, found) and not assume_installed:
            log_decision(found)
        found = state.decisions.get(key, found)
    return found


def _no_question(given: object) -> RequirementsError:
    from attnplug.selection.selection import Selection  # noqa: PLC0415 - only mistakes come by here

    allowed = "the question is an attnplug.Requirements"
    if isinstance(given, Selection):
        return RequirementsError(
            f"the decision for {given.id!r} was given as a question",
            allowed,
            "load it with selection.load(), or ask selection.requirements again",
        )
    return RequirementsError(
        f"requirements={reprlib.repr(given)} was given", allowed, "build one, or read one with Requirements.from_dict"
    )


def log_decision(explanation: Explanation) -> None:
    """Write the one record of a new decision. It carries the Selection as ``record.selection``."""
    chosen = explanation.chosen
    if chosen is None:
        _log.info("No backend can serve %s on %s", explanation.requirements, explanation.device)
    else:
        if not _log.isEnabledFor(logging.INFO):
            return  # what is unverified takes files to read
        unverified = ", ".join(f"{item.field}={item.value}" for item in chosen.unverified)
        _log.info(
            "Selected %s for %s on %s%s",
            chosen.id,
            explanation.requirements,
            explanation.device,
            f"; unverified there: {unverified}" if unverified else "",
            extra={"selection": chosen},
        )


def _frozen(settings: Settings) -> Hashable:
    """Return the options, and where everything comes from, since a decision tells that too."""
    options = settings.options
    values = (
        (backend, name, repr(value)) for backend in sorted(options) for name, value in sorted(options[backend].items())
    )
    return (*values, *settings.sources.items())
