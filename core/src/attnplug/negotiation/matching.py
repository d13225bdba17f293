"""
One candidate against one request: everything that refuses it, or the terms that are agreed on.

Requested fields are compared with declared ones, and rules that no term changes decide. What is left are the terms:
block size, layout and form of the KV cache, the CUDA graph level, and whether lengths are read from the device. The
first combination that every rule accepts is taken. All objections are collected; nothing stops at the first.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.manifest.constraint import Constraint, Range
from attnplug.manifest.schema import IsInstalled, IsRequested
from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.candidate import CACHE_TERMS, LENGTHS, Candidate, make_candidate, mentions
from attnplug.negotiation.reason import Reason
from attnplug.request.domains import GRAPH_LEVELS
from attnplug.request.fields import FIELDS
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from attnplug.manifest.schema import Condition, Manifest, Rule, Variant
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements

EVALUATIONS: Final = 20_000
"""
Evaluations of rules at most that a candidate's choice of block size, layout and form may need for one request: all its
choices times the rules about them. The number depends on manifest and request alone, not on the order in which choices
are tried. Shipped manifests need less than a hundredth of it.
"""

CacheTerms = tuple["int | None", "str | None", "str | None"]
"""A block size, a layout and a form; None for all without a paged cache."""

_View = tuple[dict[str, Any], frozenset[str]]

_EXACT: Final = dict.fromkeys(LENGTHS, "exact")
_NO_SETTINGS: Final = Settings()
_NO_NAMES: Final[frozenset[str]] = frozenset()
_NO_TERMS: Final[Mapping[str, Any]] = {}


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
        requested: The (field, value) pairs that a candidate has to declare, terms of the KV cache included. The phases
            are always among them: both are what everyone serves who declares none, and who declares one serves that
            one.
        requested_names: The fields that request something.
        cache_terms: The terms of the KV cache that are not left open; without a paged cache None for each.
        has_lengths: Whether the host has all lengths on the CPU, so that no build has to read any.
        unknown: The fields without a value until the host binds its head counts. Rules about them wait until then.
    """

    requirements: Requirements
    device: Device
    settings: Settings = _NO_SETTINGS
    origins: Mapping[str, str] = field(factory=dict)
    facts: dict[str, Any] = field(init=False)
    requested: tuple[tuple[str, Any], ...] = field(init=False)
    requested_names: frozenset[str] = field(init=False)
    cache_terms: Mapping[str, Any] = field(init=False)
    has_lengths: bool = field(init=False)
    unknown: frozenset[str] = field(init=False)
    _views: dict[tuple[str, bool], _View] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        device = self.device.facts()
        put = object.__setattr__  # of a frozen class
        put(self, "facts", {**self.requirements.facts(), **device})
        requested = (*self.requirements.requested(), *(fact for fact in device.items() if fact[1] is not None))
        put(self, "requested_names", frozenset(name for name, _ in requested))
        phases = () if "phases" in self.requested_names else (("phases", self.requirements.phases),)
        terms = {name: value for name in CACHE_TERMS if (value := self.facts[name]) is not None}
        put(self, "requested", (*requested, *phases, *terms.items()))
        put(self, "cache_terms", terms if self.requirements.paged else dict.fromkeys(CACHE_TERMS))
        put(self, "has_lengths", self.requested_names.isdisjoint(LENGTHS))
        late = self.requirements.late
        heads = frozenset(late).difference(CACHE_TERMS) if late else _NO_NAMES
        put(self, "unknown", heads | {"gqa_ratio"} if heads else heads)

    def under(self, cudagraph: str, *, reads_lengths: bool) -> _View:
        """
        Return every field with its value, and the fields that request something, with these terms.

        Args:
            cudagraph: The graph level, at least the requested one.
            reads_lengths: Whether builds read lengths from the device, so that they are exact.
        """
        found = self._views.get((cudagraph, reads_lengths))
        if found is None:
            facts, requested = {**self.facts, "cudagraph": cudagraph}, self.requested_names
            if cudagraph != self.requirements.cudagraph:
                requested |= {"cudagraph"}  # a higher level is never "never"
            if reads_lengths:
                facts |= _EXACT
                requested -= _EXACT.keys()
            found = self._views[cudagraph, reads_lengths] = (facts, requested)
        return found


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
        terms: The settled terms by name, if it can serve.
    """

    objections: tuple[Reason, ...]
    terms: Mapping[str, Any] = field(factory=dict, hash=False)


def negotiate(candidate: Candidate, request: Request, cache_terms: Mapping[str, Any] = _NO_TERMS) -> Outcome:
    """
    Negotiate with one candidate. What is installed plays no part here but for rules about installed versions.

    Args:
        candidate: The candidate.
        request: What is requested of it.
        cache_terms: Terms of the KV cache that another decision has settled.
    """
    requested = (*request.requested, *cache_terms.items()) if cache_terms else request.requested
    unsupported = candidate.objections(requested)
    given = {**request.cache_terms, **cache_terms} if cache_terms else request.cache_terms
    refusals: list[list[Reason]] = []
    for reads_lengths in (False,) if request.has_lengths else _length_choices(request, unsupported):
        if reads_lengths:
            unsupported = [reason for reason in unsupported if reason.field not in LENGTHS]
        terms, refused = _settle_cache(candidate, request, given, unsupported, reads_lengths=reads_lengths)
        if not unsupported and not refused:
            terms["reads_lengths"] = reads_lengths
            terms["cudagraph"] = _highest_level(candidate, request, terms)
            return Outcome((), terms)
        refusals.append([*unsupported, *refused])
    # No objection to lengths is final where they can be read.
    if len(refusals) > 1 and not any(name in LENGTHS for each in refusals[0] for name in each.field.split(" and ")):
        return Outcome(tuple(refusals[0]))
    return Outcome(tuple(refusals[-1]))


def _length_choices(request: Request, unsupported: Sequence[Reason]) -> tuple[bool, ...]:
    """Return whether builds read the lengths that the host lacks: the choices in order of preference."""
    # Every build needs query lengths, because core splits each batch by them.
    if "query_lens_cpu_kind" in request.requested_names or any(reason.field in LENGTHS for reason in unsupported):
        return (True,)
    return (False, True)  # each build waits for such a read: no layout and no graph level is preferred to doing without


def _settle_cache(
    candidate: Candidate,
    request: Request,
    given: Mapping[str, Any],
    unsupported: Sequence[Reason],
    *,
    reads_lengths: bool,
) -> tuple[dict[str, Any], list[Reason]]:
    """Return the first block size, layout and form that every rule accepts, or the objections to the first of all."""
    facts, requested = request.facts, request.requested_names
    if reads_lengths:
        facts, requested = request.under(request.requirements.cudagraph, reads_lengths=True)
    rules = _known(candidate.fixed_rules, request) if request.unknown else candidate.fixed_rules
    refused = _objections(rules, candidate, facts, requested)
    live = live_rules(candidate, request, facts, requested) if candidate.cache_rules else []
    if not live:
        return {} if refused or unsupported else {**candidate.first_terms, **given}, refused
    if any(reason.field in CACHE_TERMS for reason in unsupported):
        given = {**candidate.first_terms, **given}  # no other choice of the rest makes a term supported
    work = evaluations_of(candidate, given, live)
    if work > EVALUATIONS:
        return {}, [*refused, _too_much(candidate, given, live, work)]
    terms = next(_accepted(candidate, given, live, facts, requested), None)
    if terms is not None:
        return terms, refused
    first = next(_combinations(candidate, given, live))
    return {}, refused + _objections(live, candidate, {**facts, **first}, requested)


def refusing_rules(candidate: Candidate, request: Request) -> list[Rule]:
    """Return the rules that refuse a request whatever is chosen: block size, layout, form, or to read lengths."""
    rules = _known(candidate.fixed_rules, request)
    views = [request.under(request.requirements.cudagraph, reads_lengths=reads) for reads in (False, True)]
    found = [[rule for rule, _ in _refusing(rules, candidate, *view)] for view in views]
    return [rule for rule in dict.fromkeys(found[0]) if rule in found[1]]


def settling_work(candidate: Candidate, request: Request) -> int:
    """Return how many evaluations of rules settle the terms of the KV cache for a request."""
    if not candidate.cache_rules:
        return 0
    live = live_rules(candidate, request, request.facts, request.requested_names)
    return evaluations_of(candidate, request.cache_terms, live)


def most_evaluations(manifest: Manifest, variant: Variant) -> int:
    """Return how many of `EVALUATIONS` a request takes at most: one that leaves block size, layout and form open."""
    candidate = make_candidate(manifest, variant, lambda _: None, assume_installed=True)
    return evaluations_of(candidate, _NO_TERMS, candidate.cache_rules)


def evaluations_of(candidate: Candidate, given: Mapping[str, Any], live: Sequence[Rule]) -> int:
    """Return how many evaluations of rules settle the terms of the KV cache that are not given, at most."""
    rules = len(live) + len(candidate.graph_rules) * len(candidate.graph_levels) * candidate.graph_follows_cache
    return rules * prod(len(candidate.choices[name]) for name in _mentioned(live) if name not in given)


def _too_much(candidate: Candidate, given: Mapping[str, Any], live: Sequence[Rule], work: int) -> Reason:
    names = [name for name in _mentioned(live) if name not in given]
    return Reason(
        "work",
        " and ".join(names),
        tuple(None for _ in names),
        f"its rules about {', '.join(names)} need {work:,} evaluations for this request, and {EVALUATIONS:,} are made",
        f"request {' and '.join(names)}, or ask the author of {candidate.distribution or candidate.backend} for fewer"
        " rules or choices",
    )


def _combinations(candidate: Candidate, given: Mapping[str, Any], live: Sequence[Rule]) -> Iterator[dict[str, Any]]:
    """Yield block sizes, layouts and forms, preferred ones first: of a term that no rule mentions the first alone."""
    names = [name for name in _mentioned(live) if name not in given]
    for values in product(*map(candidate.choices.__getitem__, names)):
        yield {**candidate.first_terms, **given, **dict(zip(names, values, strict=True))}


def _accepted(
    candidate: Candidate,
    given: Mapping[str, Any],
    live: Sequence[Rule],
    facts: Mapping[str, Any],
    requested: frozenset[str],
) -> Iterator[dict[str, Any]]:
    """Yield those of the combinations that every rule accepts."""
    tried = dict(facts)  # one table for thousands of combinations
    for terms in _combinations(candidate, given, live):
        tried.update(terms)
        if next(_refusing(live, candidate, tried, requested), None) is None:
            yield terms


def _mentioned(live: Sequence[Rule]) -> list[str]:
    return [name for name in CACHE_TERMS if any(mentions(rule, {name}) for rule in live)]


def _highest_level(candidate: Candidate, request: Request, terms: Mapping[str, Any]) -> str:
    """Return the highest graph level at which terms pass that do so at the requested one."""
    # An engine that requested less may still capture graphs at a higher level.
    rules = _known(candidate.graph_rules, request)
    for level in candidate.graph_levels:
        if not rules or level == request.requirements.cudagraph:
            return level
        facts, requested = request.under(level, reads_lengths=terms["reads_lengths"])
        if candidate.graph_follows_cache:
            facts = {**facts, **terms, "cudagraph": level}
        if next(_refusing(rules, candidate, facts, requested), None) is None:
            return level
    return request.requirements.cudagraph


def _objections(
    rules: Sequence[Rule], candidate: Candidate, facts: Mapping[str, Any], requested: frozenset[str]
) -> list[Reason]:
    """Evaluate rules, and return all that they refuse."""
    if not rules:
        return []
    return [
        _refusal(rule, facts) if condition is None else _lack(rule, condition, facts)
        for rule, condition in _refusing(rules, candidate, facts, requested)
    ]


def _refusing(
    rules: Sequence[Rule], candidate: Candidate, facts: Mapping[str, Any], requested: frozenset[str]
) -> Iterator[tuple[Rule, Condition | None]]:
    """
    Yield each rule that refuses, with the condition that it needs and that does not hold; None where it needs none.

    Every evaluation of a rule by a negotiation is one turn of this loop.
    """
    installed = candidate.installed
    for rule in rules:
        for condition in rule.when:  # `all_hold`, without a call for each rule of each candidate
            if not condition.holds(facts, requested, installed, absent=False):
                break  # the rule is about other requests
        else:
            if not rule.need:
                yield rule, None
            for condition in rule.need:
                if not condition.holds(facts, requested, installed, absent=True):
                    yield rule, condition


def _lack(rule: Rule, condition: Condition, facts: Mapping[str, Any]) -> Reason:
    return Reason("rule", condition.field, _plain(condition, facts), _needed(condition, facts), rule.because)


def _needed(condition: Condition, facts: Mapping[str, Any]) -> str:
    """Return what a rule needs, in words."""
    if isinstance(condition, IsInstalled):
        return " or ".join(condition.requirements)
    if not isinstance(condition, IsRequested):
        return str(condition)
    if not condition.requested:
        return f"no {condition.field}"
    # A field that requests nothing may have a value all the same, such as a cache's dtype.
    return f"another {condition.field}" if facts[condition.field] else condition.field


def _refusal(rule: Rule, facts: Mapping[str, Any]) -> Reason:
    fields = " and ".join(condition.field for condition in rule.when)
    wanted = [_plain(condition, facts) for condition in rule.when]
    return Reason("rule", fields, wanted[0] if len(wanted) == 1 else tuple(wanted), "", rule.because)


def _plain(condition: Condition, facts: Mapping[str, Any]) -> Any:
    if isinstance(condition, IsInstalled):
        return " or ".join(condition.requirements)
    value = facts.get(condition.field)
    return None if value is None else FIELDS[condition.field].domain.dump(value)


def all_hold(
    when: Sequence[Condition],
    facts: Mapping[str, Any],
    requested: frozenset[str],
    installed: frozenset[IsInstalled] = frozenset(),
    besides: Collection[str] = (),
) -> bool:
    """Whether all conditions hold but those on the fields `besides`; other arguments as for `Holds.holds`."""
    for condition in when:
        if condition.field not in besides and not condition.holds(facts, requested, installed, absent=False):
            return False
    return True


def live_rules(
    candidate: Candidate, request: Request, facts: Mapping[str, Any], requested: frozenset[str]
) -> list[Rule]:
    """Return the rules about block size, layout or form that apply under some of these: whose other conditions hold."""
    rules = _known(candidate.cache_rules, request)
    return [rule for rule in rules if all_hold(rule.when, facts, requested, candidate.installed, besides=CACHE_TERMS)]


def _known(rules: Sequence[Rule], request: Request) -> Sequence[Rule]:
    """Return the rules that are about nothing unknown."""
    return [rule for rule in rules if not mentions(rule, request.unknown)] if request.unknown else rules


def passing_terms(candidate: Candidate, request: Request, terms: Mapping[str, Any]) -> tuple[CacheTerms, ...]:
    """
    Return every (block size, layout, form) that a candidate accepts for a request that it can serve, best first.

    Block sizes beyond 1024 tokens are considered only where the manifest names them.

    Args:
        candidate: The candidate.
        request: What is requested of it.
        terms: The terms of `negotiate`: lengths are read, or not, as there.
    """
    if not request.requirements.paged:
        return ()
    given = request.cache_terms
    facts, requested = request.under(request.requirements.cudagraph, reads_lengths=terms["reads_lengths"])
    live = live_rules(candidate, request, facts, requested)
    places = [CACHE_TERMS.index(name) for name in _mentioned(live)]
    accepted = {
        tuple(each[CACHE_TERMS[place]] for place in places)
        for each in _accepted(candidate, given, live, facts, requested)
    }
    choices = tuple((given[name],) if name in given else tuple(candidate.choices[name]) for name in CACHE_TERMS)
    every = _combined(choices)
    if not places:  # no rule refuses some of them: most candidates
        return every if accepted else ()
    return tuple(values for values in every if tuple(values[place] for place in places) in accepted)


def passes(candidate: Candidate, request: Request, terms: Mapping[str, Any], values: CacheTerms) -> bool:
    """Return whether one (block size, layout, form) is among the `passing_terms`: of thousands, without making them."""
    wanted = dict(zip(CACHE_TERMS, values, strict=True))
    for name, value in wanted.items():
        given = request.cache_terms
        if value != given[name] if name in given else value not in candidate.choices[name]:
            return False
    facts, requested = request.under(request.requirements.cudagraph, reads_lengths=terms["reads_lengths"])
    live = live_rules(candidate, request, facts, requested)
    return next(_refusing(live, candidate, {**facts, **wanted}, requested), None) is None


@lru_cache(maxsize=32)
def _combined(choices: tuple[tuple[Any, ...], ...]) -> tuple[CacheTerms, ...]:
    """Return all combinations of choices: thousands, and the same ones for many candidates."""
    return tuple(product(*choices))


def open_block_size(
    candidate: Candidate, request: Request, terms: Mapping[str, Any], common: Sequence[CacheTerms]
) -> tuple[Mapping[str, Any], Constraint]:
    """
    Return terms whose block size is left open, and the block sizes for which they hold.

    Args:
        candidate: The candidate.
        request: What is requested of it.
        terms: The terms of `negotiate`.
        common: The terms that all layers of a model accept; empty where they are not planned together.
    """
    declared = candidate.supports("block_size") or Constraint(FIELDS["block_size"].domain, (Range(min=1),))
    view = request.under(request.requirements.cudagraph, reads_lengths=terms["reads_lengths"])
    level_depends_on_it = any(
        mentions(rule, {"block_size"})
        and all_hold(rule.when, *view, candidate.installed, besides=(*CACHE_TERMS, "cudagraph"))
        for rule in candidate.graph_rules
    )
    if not common and not level_depends_on_it and not live_rules(candidate, request, *view):
        whole = (Range(min=1) if each == Range() else each for each in declared.alternatives)
        return {**terms, "block_size": None}, Constraint(declared.domain, tuple(whole))
    # A rule can refuse any block size, so the set is found by trial, and stated as far as it was tried.
    first: dict[int | None, Mapping[str, Any]] = {}
    for values in common or passing_terms(candidate, request, terms):
        first.setdefault(values[0], {**terms, **dict(zip(CACHE_TERMS, values, strict=True))})
    # What depends on the block size is open too, but for the graph level: the lowest holds for all of them.
    found = {name: {each[name] for each in first.values()} for name in CACHE_TERMS[1:]}
    same = {name: values.pop() if len(values) == 1 else None for name, values in found.items()}
    level = min((_highest_level(candidate, request, each) for each in first.values()), key=GRAPH_LEVELS.index)
    settled = {**terms, **same, "block_size": None, "cudagraph": level}
    return settled, declared.restrict(lambda size: size in first)


def agree(
    candidate: Candidate, request: Request, terms: Mapping[str, Any], block_sizes: Constraint | None = None
) -> Agreement:
    """Return the agreement with a candidate on the terms that were settled."""
    return Agreement(
        backend=candidate.backend,
        variant=candidate.id.partition("/")[2],
        requirements=request.requirements,
        **terms,
        kv_cache_dtype=request.requirements.kv_cache_dtype,
        options=candidate.manifest.options_under(request.settings) if candidate.manifest else {},
        block_sizes=block_sizes,
    )
