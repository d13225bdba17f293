"""
One candidate against one request: everything that refuses it, and the terms where nothing does.

The order of work: requested fields against declared ones, rules about them, then the free fields (block size, layout,
form) in declared order until the remaining rules pass. All objections are collected; nothing stops at the first.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from attnplug.manifest.schema import IsInstalled, IsRequested
from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.candidate import FREE, TERMS, Candidate, mentions
from attnplug.negotiation.reason import Reason
from attnplug.request.fields import FIELDS
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.manifest.schema import Condition, Rule
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements

_NO_TERMS: Final[Mapping[str, Any]] = dict.fromkeys(TERMS)
LENGTHS: Final = "seq_lens_cpu_kind"
"""The field to which no objection is final: a build can read the lengths that a host lacks from the device."""

QUERY_LENGTHS: Final = "query_lens_cpu_kind"
"""Likewise, and every build reads them: core splits each batch by them."""

_NO_SETTINGS: Final = Settings()
_NO_NAMES: Final[frozenset[str]] = frozenset()


@frozen(eq=False)
class Request:
    """
    Requirements on a device, under settings, prepared for the evaluation of many candidates.

    Attributes:
        requirements: What is requested.
        device: Where it shall run.
        settings: The settings that hold; of them negotiation reads the options of backends.
        origins: Where values come from that the caller has not stated, by field: a setting, for example.
        facts: Every field with its value.
        requested: The (field, value) pairs that a candidate has to declare. The phases are always among them: both are
            what everyone serves who declares none, and who declares one serves that one.
        requested_names: The fields that request something.
        requested_terms: Those of the free fields that are not left open.
        unknown: The fields without a value until the host binds its head counts. Rules about them wait until then.
        as_exact: The same with exact lengths on the CPU, which a build can read from the device; None where they are.
    """

    requirements: Requirements
    device: Device
    settings: Settings = _NO_SETTINGS
    origins: Mapping[str, str] = field(factory=dict)
    facts: dict[str, Any] = field(init=False)
    requested: tuple[tuple[str, Any], ...] = field(init=False)
    requested_names: frozenset[str] = field(init=False)
    requested_terms: tuple[tuple[str, Any], ...] = field(init=False)
    unknown: frozenset[str] = field(init=False)
    as_exact: Request | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        device = self.device.facts()
        put = object.__setattr__  # of a frozen class
        put(self, "facts", {**self.requirements.facts(), **device})
        requested = (*self.requirements.requested(), *(fact for fact in device.items() if fact[1] is not None))
        put(self, "requested_names", frozenset(name for name, _ in requested))
        phases = () if "phases" in self.requested_names else (("phases", self.requirements.phases),)
        put(self, "requested", (*requested, *phases))
        terms = ((name, self.facts[name]) for name in TERMS)
        put(self, "requested_terms", tuple(term for term in terms if term[1] is not None))
        late = self.requirements.late
        heads = frozenset(late) - FREE if late else _NO_NAMES
        put(self, "unknown", heads | {"gqa_ratio"} if heads else heads)
        if LENGTHS in self.requested_names or QUERY_LENGTHS in self.requested_names:
            exact = self.requirements.evolve(**{LENGTHS: "exact", QUERY_LENGTHS: "exact"})
            put(self, "as_exact", Request(exact, self.device, self.settings, self.origins))


def build_request(requirements: Requirements, device: Device, settings: Settings) -> Request:
    """
    Return the request that requirements make under settings.

    A KV-cache layout that the requirements leave open is that of the settings. It is then requested like everything
    else: used, or refused with a reason that names where it is set.
    """
    layout = settings.kv_layout
    if layout is None or requirements.kv_layout is not None or not requirements.paged:
        return Request(requirements, device, settings)
    origins = {"kv_layout": settings.sources.get("kv_layout", "the settings")}
    return Request(requirements.evolve(kv_layout=layout), device, settings, origins)


@frozen
class Outcome:
    """
    What negotiation with one candidate comes to.

    Attributes:
        objections: Everything that refuses it; empty if it can serve.
        terms: The settled free fields, if it can serve.
    """

    objections: tuple[Reason, ...]
    terms: Mapping[str, Any] = field(factory=dict, hash=False)


def negotiate(candidate: Candidate, request: Request) -> Outcome:
    """Negotiate with one candidate. What is installed plays no part here but for rules about installed versions."""
    objections = candidate.objections(request.requested)  # a new list: rules append to it
    for rule in candidate.fixed_rules if not request.unknown else _known_rules(candidate.fixed_rules, request):
        _apply(rule, candidate, request, request.facts, objections)
    terms, objection = _settle(candidate, request)
    outcome = Outcome((*objections, *objection), terms)
    if request.as_exact is None or not outcome.objections:
        return outcome
    # Lengths that are read from the device serve what needs exact ones, so no objection to them is final.
    read = negotiate(candidate, request.as_exact)
    lengths = (LENGTHS, QUERY_LENGTHS)
    if read.objections and not any(
        name in lengths for each in outcome.objections for name in each.field.split(" and ")
    ):
        return outcome
    return read


def reads_lengths(candidate: Candidate, request: Request) -> bool:
    """Whether a candidate that can serve the request needs lengths on the CPU that the host does not have there."""
    if request.as_exact is None:
        return False
    if QUERY_LENGTHS in request.requested_names:
        return True
    natively = evolve(request)
    object.__setattr__(natively, "as_exact", None)  # of a frozen class
    return bool(negotiate(candidate, natively).objections)


def agree(candidate: Candidate, request: Request, terms: Mapping[str, Any]) -> Agreement:
    """
    Return the agreement with a candidate that can serve.

    Args:
        candidate: The candidate.
        request: What is requested of it.
        terms: A block size, a layout and a form that pass; None for all without a paged cache.
    """
    return Agreement(
        backend=candidate.backend,
        variant=candidate.id.partition("/")[2],
        requirements=request.requirements,
        **terms,
        kv_cache_dtype=request.requirements.kv_cache_dtype,
        cudagraph=graph_level(candidate, request),
        options=candidate.manifest.options_under(request.settings) if candidate.manifest else {},
        reads_lengths=reads_lengths(candidate, request),
    )


def graph_level(candidate: Candidate, request: Request) -> str:
    """Return the highest CUDA graph level that a candidate, able to serve the request, supports for it."""
    # An engine that requested less may still capture graphs at a higher level, so the highest one is agreed on.
    for level in candidate.graph_levels:
        if not candidate.has_graph_rules or _serves_level(candidate, request, level):
            return level
    return request.requirements.cudagraph


def _serves_level(candidate: Candidate, request: Request, level: str) -> bool:
    return not negotiate(candidate, Request(request.requirements.evolve(cudagraph=level), request.device)).objections


def _apply(rule: Rule, candidate: Candidate, request: Request, facts: dict[str, Any], objections: list[Reason]) -> None:
    for condition in rule.when:
        if not condition.holds(facts, request.requested_names, candidate.installed, absent=False):
            return  # the rule is about other requests
    if not rule.need:
        objections.append(_refusal(rule, facts))
    objections.extend(
        Reason("rule", condition.field, _plain(condition, facts), _needed(condition, facts), rule.because)
        for condition in rule.need
        if not condition.holds(facts, request.requested_names, candidate.installed, absent=True)
    )


def _needed(condition: Condition, facts: dict[str, Any]) -> str:
    """Return what a rule needs, in words."""
    if isinstance(condition, IsInstalled):
        return " or ".join(condition.requirements)
    if not isinstance(condition, IsRequested):
        return str(condition)
    if not condition.requested:
        return f"no {condition.field}"
    # A field that requests nothing may have a value all the same, such as a cache's dtype.
    return f"another {condition.field}" if facts[condition.field] else condition.field


def _refusal(rule: Rule, facts: dict[str, Any]) -> Reason:
    fields = " and ".join(condition.field for condition in rule.when)
    wanted = [_plain(condition, facts) for condition in rule.when]
    return Reason("rule", fields, wanted[0] if len(wanted) == 1 else tuple(wanted), "", rule.because)


def _plain(condition: Condition, facts: dict[str, Any]) -> Any:
    if isinstance(condition, IsInstalled):
        return " or ".join(condition.requirements)
    value = facts.get(condition.field)
    return None if value is None else FIELDS[condition.field].domain.dump(value)


def _settle(candidate: Candidate, request: Request) -> tuple[Mapping[str, Any], list[Reason]]:
    """Return the first terms that pass, or the objections to the first ones."""
    rules = live_rules(candidate, request)
    if not rules:  # then the first terms pass if any do: only requested terms can be refused
        objections = candidate.objections(request.requested_terms)
        return ({} if objections else _first_terms(candidate, request)), objections
    first: list[Reason] | None = None
    for terms in _all_terms(candidate, request):
        objections = _judge(candidate, request, terms, rules)
        if not objections:
            return terms, []
        first = objections if first is None else first
    return {}, first or []


def judge_terms(candidate: Candidate, request: Request, terms: Mapping[str, Any]) -> list[Reason]:
    """
    Return the objections of a candidate to settled terms: a block size, a layout and a form, or None for all without a
    paged cache.
    """
    if request.as_exact is not None and reads_lengths(candidate, request):
        request = request.as_exact
    return _judge(candidate, request, terms, live_rules(candidate, request))


def _judge(candidate: Candidate, request: Request, terms: Mapping[str, Any], rules: Sequence[Rule]) -> list[Reason]:
    objections = candidate.objections(term for term in terms.items() if term[1] is not None)
    if rules:
        facts = {**request.facts, **terms}
        for rule in rules:
            _apply(rule, candidate, request, facts, objections)
    return objections


def live_rules(candidate: Candidate, request: Request) -> list[Rule]:
    """Return the rules about free fields that apply under some terms: whose other conditions hold."""
    rules = candidate.free_rules if not request.unknown else _known_rules(candidate.free_rules, request)
    return [rule for rule in rules if _is_live(rule, candidate, request)]


def _known_rules(rules: Sequence[Rule], request: Request) -> list[Rule]:
    """Return the rules that are about nothing unknown."""
    return [rule for rule in rules if not mentions(rule, request.unknown)]


def _is_live(rule: Rule, candidate: Candidate, request: Request) -> bool:
    for condition in rule.when:
        if condition.field not in FREE and not condition.holds(
            request.facts, request.requested_names, candidate.installed, absent=False
        ):
            return False
    return True


def _first_terms(candidate: Candidate, request: Request) -> Mapping[str, Any]:
    """Return the first of `_all_terms`, which is most of what a decision without rules about them does."""
    wanted = request.requirements
    if not wanted.paged:
        return _NO_TERMS
    size, layout, form = candidate.first_terms
    return {
        "block_size": size if wanted.block_size is None else wanted.block_size,
        "kv_layout": layout if wanted.kv_layout is None else wanted.kv_layout,
        "kv_cache_form": form if wanted.kv_cache_form is None else wanted.kv_cache_form,
    }


def _all_terms(candidate: Candidate, request: Request) -> Iterator[Mapping[str, Any]]:
    """Yield terms in declared order."""
    wanted = request.requirements
    if not wanted.paged:
        yield _NO_TERMS
        return
    known = (wanted.block_size, wanted.kv_layout, wanted.kv_cache_form)
    open_terms = candidate.terms_to_try
    choices = [to_try or (None,) if one is None else (one,) for one, to_try in zip(known, open_terms, strict=True)]
    for size, layout, form in product(*choices):
        yield {"block_size": size, "kv_layout": layout, "kv_cache_form": form}
