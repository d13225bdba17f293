"""
The fix of a candidate that cannot serve: the smallest change, checked to work.

First other values of engine fields: sets of changes, fewest first, nearest values first. A change that implies others
is counted with them: a request without a paged cache has no block size either. Then another device, then another
version of what is installed. A model field is never changed. The search is bounded by a number of evaluations of rules,
for each candidate alone.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug.errors import AttnplugError
from attnplug.manifest.constraint import Constraint, Exact, Range
from attnplug.manifest.schema import Holds, IsInstalled
from attnplug.negotiation import matching
from attnplug.negotiation.candidate import CACHE_TERMS, LENGTHS
from attnplug.negotiation.matching import Request, negotiate, refusing_rules, settling_work
from attnplug.negotiation.reason import Fix
from attnplug.request.capability import HARDWARE, ComputeCapability
from attnplug.request.device import Device, default_vendor
from attnplug.request.domains import Flag, Integer, Level, Name, Names
from attnplug.request.fields import FIELDS, fields_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.manifest.schema import Rule
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.reason import Reason


EVALUATIONS: Final = 100_000
"""
Evaluations of rules at most in the search for one candidate's fix. A change that is tried counts as `_TRIAL` for the
request that is made of it, and as one for each rule and each choice of block size, layout and form that it may need.
"""
_TRIAL: Final = 20

_ENGINE = tuple(item.name for item in fields_of("engine"))
_OF_PAGES: Mapping[str, Any] = {item.name: item.neutral for item in FIELDS.values() if item.of_pages}
"""What only a paged KV cache has, with the values that request nothing."""
_NEUTRAL: Mapping[str, Any] = {item.name: item.neutral for item in fields_of("engine")}
"""Every engine field at the value that requests nothing: there is no paged KV cache."""


class _ExhaustedError(Exception):
    """The search for a fix has made all of its evaluations."""


class _Search:
    """The search for one candidate's fix, with the evaluations that are left to it."""

    def __init__(self) -> None:
        self._left = EVALUATIONS

    def serves(self, candidate: Candidate, request: Request, changes: Mapping[str, Any]) -> bool:
        """
        Whether a candidate serves a request with some changes, which may contradict each other.

        Raises:
            _ExhaustedError: No evaluations are left for it.
        """
        self._spend(_TRIAL)
        changed = _changed(request, changes)
        if changed is None:
            return False
        self._spend(len(candidate.rules) + min(settling_work(candidate, changed), matching.EVALUATIONS))
        return not negotiate(candidate, changed).objections

    def _spend(self, evaluations: int) -> None:
        self._left -= evaluations
        if self._left < 0:
            raise _ExhaustedError


def changes_of(candidate: Candidate, request: Request) -> Iterator[dict[str, Any]]:
    """
    Yield sets of engine fields with other values.

    Each field that is objected to has to change; those that rules mention may, since they can switch a rule off. Each
    rule that refuses the request has to see a change: of more no set is yielded that leaves it as it is, and none where
    a rule is about model and device alone.
    """
    rules = refusing_rules(candidate, request)
    if any(_is_final(rule, candidate, request) for rule in rules):
        return
    objected = objected_fields(candidate, request)
    ruled = _ruled(candidate, objected)
    refusing = [{c.field for c in (*rule.when, *rule.need)} for rule in rules]
    options = {name: _options(candidate, request, name) for name in (*objected, *ruled)}
    # Implied changes count too, so a set may turn out larger than the fields that were chosen: it waits for its size.
    later: dict[int, list[dict[str, Any]]] = {}
    for size in range(len(objected), len(objected) + len(ruled) + 1):
        for names in combinations(ruled, size - len(objected)):
            changing = (*objected, *names)
            if any(fields.isdisjoint(_with_followers(request, changing)) for fields in refusing):
                continue
            for values in product(*(options[name] for name in changing)):
                changes = _with_implied(request, dict(zip(changing, values, strict=True)))
                if len(changes) == size:
                    yield changes
                else:
                    later.setdefault(len(changes), []).append(changes)
        yield from later.pop(size, ())
    for size in sorted(later):
        yield from later[size]


def _is_final(rule: Rule, candidate: Candidate, request: Request) -> bool:
    """Whether a rule refuses a request whatever its engine fields are: it applies, and lacks what none gives."""
    if any(condition.field in _ENGINE for condition in rule.when):
        return False
    given = (request.facts, request.requested_names, candidate.installed)
    of_model = [condition for condition in rule.need if condition.field not in _ENGINE]
    return not rule.need or not all(condition.holds(*given, absent=True) for condition in of_model)


def objected_fields(candidate: Candidate, request: Request) -> tuple[str, ...]:
    """Return the fields whose values the candidate does not declare, but for lengths, which a build can read."""
    pairs = request.requested
    return tuple(pair[0] for pair in pairs if pair[0] not in LENGTHS and candidate.objections((pair,)))


def _ruled(candidate: Candidate, objected: tuple[str, ...]) -> tuple[str, ...]:
    """Return the other engine fields on which a rule depends."""
    mentioned = {condition.field for rule in candidate.rules for condition in (*rule.when, *rule.need)}
    if not mentioned.isdisjoint(CACHE_TERMS):
        mentioned.add("paged")  # without a paged cache there is no block size for a rule to refuse
    if "decode_query_len" in mentioned:
        mentioned.add("phases")  # only a request that decodes has a decode query length
    return tuple(name for name in _ENGINE if name in mentioned and name not in objected)


def _with_followers(request: Request, names: Sequence[str]) -> set[str]:
    """Return fields with those whose values may have to change with them: see `_with_implied`."""
    found = {*names}
    if "paged" in found:
        found |= _OF_PAGES.keys()
    elif not request.requirements.paged and not found.isdisjoint(_OF_PAGES):
        found.add("paged")
    if "phases" in found:
        found.add("decode_query_len")
    return found


def _with_implied(request: Request, changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes with what follows from them, so that they contradict nothing."""
    wanted = request.requirements
    if changes.get("paged") is False:
        current = {"kv_cache_dtype": wanted.dtype}
        changes = {**{n: v for n, v in _OF_PAGES.items() if getattr(wanted, n) != current.get(n, v)}, **changes}
    elif not wanted.paged and any(value != _OF_PAGES.get(name, value) for name, value in changes.items()):
        changes = {"paged": True, **changes}
    if wanted.decode_query_len > 1 and "decode" not in changes.get("phases", ("decode",)):
        changes = {"decode_query_len": 1, **changes}
    return changes


def _options(candidate: Candidate, request: Request, name: str) -> tuple[Any, ...]:
    """Return other values for an engine field, nearest first; only those that the candidate serves."""
    wanted = request.facts[name]
    if wanted is None and FIELDS[name].free and settling_work(candidate, request) <= matching.EVALUATIONS:
        return ()  # open already: no single value serves where none of them did
    constraint = candidate.supports(name)
    values: list[Any] = []
    if isinstance(FIELDS[name].domain, Names):
        values = _sets(candidate, name, wanted)
    elif name == "paged" and wanted and _changed(request, _NEUTRAL) is None:
        return ()  # the model needs pages: no other change makes a request without them consistent
    elif constraint is not None:
        values = [
            constraint.first() if wanted is None else constraint.nearest(wanted),
            *_ordered(constraint, wanted),
            *_rule_values(candidate, name, constraint),
        ]
    values.append(FIELDS[name].neutral_for(request.facts.__getitem__))
    return tuple(dict.fromkeys(v for v in values if v != wanted and (v is not None or FIELDS[name].is_optional())))


def _sets(candidate: Candidate, name: str, wanted: tuple[str, ...]) -> list[Any]:
    """Return sets of supported names: the requested ones among them, these with one more, with one less."""
    constraint, item = candidate.supports(name), FIELDS[name]
    known = candidate.variant.features if name == "features" and candidate.variant else item.neutral
    served = {each for each in known if constraint is None or constraint.allows((each,))}
    kept = served.intersection(wanted)
    near = [kept, *(kept | {each} for each in known), *(kept - {each} for each in known), *({each} for each in known)]
    return [item.domain.canonical(names & served) for names in near if names & served or not item.neutral]


def _ordered(constraint: Constraint, wanted: Any) -> list[Any]:
    """Return the members of a finite field, nearest levels first."""
    if isinstance(constraint.domain, Integer):
        return []
    listed: list[Any] = [True, False] if isinstance(constraint.domain, Flag) else []
    if isinstance(constraint.domain, Name):
        listed = [name for name in constraint.domain.values if name != "auto"]
    if isinstance(constraint.domain, Level):
        listed.sort(key=lambda level: abs(constraint.domain.rank(level) - constraint.domain.rank(wanted)))
    return [value for value in listed if constraint.allows(value)]


def _rule_values(candidate: Candidate, name: str, constraint: Constraint) -> list[Any]:
    """Return, for whole numbers, the allowed values around every bound that a rule draws."""
    if not isinstance(constraint.domain, Integer):
        return []
    found: list[Any] = list(constraint.choices())
    for rule in candidate.rules:
        for condition in (*rule.when, *rule.need):
            if isinstance(condition, Holds) and condition.field == name:
                found += constraint.intersect(condition.constraint).choices()
                found += [constraint.nearest(max(bound, 1)) for bound in _bounds(condition.constraint)]
    # Also try the neighbors of each bound, one `multiple_of` step to each side.
    step = max((a.multiple_of or 1 for a in constraint.alternatives if isinstance(a, Range)), default=1)
    around = [value + step for value in found if value is not None] + [
        value - step for value in found if value is not None and value > step
    ]
    return [value for value in found + around if value is not None and constraint.allows(value)]


def _bounds(constraint: Constraint) -> Iterator[int]:
    for alternative in constraint.alternatives:
        drawn = (alternative.value,) if isinstance(alternative, Exact) else (alternative.min, alternative.max)
        for bound in drawn:
            if bound is not None:
                yield from (bound - 1, bound, bound + 1)  # on both sides of it, whichever of them the rule refuses


def find_fix(candidate: Candidate, request: Request) -> Fix:
    """
    Find the fix for a candidate that cannot serve.

    Args:
        candidate: The candidate.
        request: What it cannot serve, as it is installed or at all.
    """
    if candidate.variant is None or candidate.availability == "broken":
        return Fix(install=candidate.install, action=candidate.fix)
    search, objections = _Search(), negotiate(candidate, request).objections
    try:
        found = _smallest(search, candidate, request)
        if found is not None:
            return Fix(candidate.install, *found, candidate.fix)
        if any(isinstance(c, IsInstalled) for rule in candidate.rules for c in (*rule.when, *rule.need)):
            # Every change fails with these versions. Would one work with versions that no rule is about?
            found = _smallest(search, candidate.if_installed, request)
            if found is not None:
                return Fix(candidate.install, *found, _other_version(candidate, objections))
    except _ExhaustedError:
        unknown = f"more than {EVALUATIONS:,} evaluations of its rules to find a change that serves"
        return evolve(_none(objections, request), needs=(unknown,))
    return _none(objections, request)


def _smallest(search: _Search, candidate: Candidate, request: Request) -> tuple[dict[str, Any], Device | None] | None:
    """Return the smallest change that works, or None: on the same device if any does, else on the nearest of others."""
    here = _fewest(search, candidate, request)
    if here is not None:
        return here, None
    best: tuple[dict[str, Any], Device | None] | None = None
    tried = {_seen_by_rules(candidate, request)}
    for device in _devices(candidate, request):
        elsewhere = Request(request.requirements, device)
        seen = _seen_by_rules(candidate, elsewhere)
        if seen in tried:
            continue  # the same search, with the same result
        tried.add(seen)
        # Only a device with fewer changes than the best so far counts: devices come nearest first.
        most = None if best is None else len(best[0]) - 1
        there = _fewest(search, candidate, elsewhere, most)
        if there is not None:
            best = there, device
            if not there:
                break  # no device needs fewer changes than none
    return best


def _seen_by_rules(candidate: Candidate, request: Request) -> tuple[bool, ...]:
    """Return what a candidate sees of the device: whether it is served at all, and each condition on it."""
    objected = any(_is_of_device(name) for name in objected_fields(candidate, request))
    conditions = (c for rule in candidate.rules for c in (*rule.when, *rule.need) if _is_of_device(c.field))
    known = (request.facts, request.requested_names, frozenset[IsInstalled]())
    return (objected, *(c.holds(*known, absent=absent) for c in conditions for absent in (False, True)))


def _is_of_device(name: str) -> bool:
    return name in FIELDS and FIELDS[name].kind == "device"


def _fewest(search: _Search, candidate: Candidate, request: Request, most: int | None = None) -> dict[str, Any] | None:
    """Return the fewest changes of engine fields that work, if there are any, and no more than so many."""
    if any(FIELDS[name].kind != "engine" for name in objected_fields(candidate, request)):
        return None  # no engine field removes an objection to the model or to this device
    for changes in changes_of(candidate, request):
        if most is not None and len(changes) > most:
            break
        if search.serves(candidate, request, changes):
            return changes
    return None


def _changed(request: Request, changes: Mapping[str, Any]) -> Request | None:
    if not changes:
        return request
    try:
        return Request(request.requirements.evolve(**changes), request.device)
    except AttnplugError:
        return None  # the changes contradict each other


def _devices(candidate: Candidate, request: Request) -> Iterator[Device]:
    """Yield other devices of the declared types: the same type first, nearest compute capability first."""
    types = candidate.supports("device_type")
    declared = types.members() if types else ()
    for kind in sorted(declared, key=lambda kind: kind != request.device.type):
        vendors = candidate.supports("vendor")
        for vendor in vendors.choices() if vendors and kind == "cuda" else (default_vendor(kind),):
            if vendor == "nvidia":
                for capability in _capabilities(candidate, request):
                    yield Device.cuda((capability.major, capability.minor))
            elif (device := Device(kind, vendor=vendor)) != request.device:
                yield device


def _capabilities(candidate: Candidate, request: Request) -> tuple[Any, ...]:
    declared = candidate.supports("compute_capability")
    if declared is None:
        return ()
    here = request.device.compute_capability
    # The nearest declared capability first, then those that rules name, ends of ranges, and all existing hardware:
    # a rule may refuse the nearest.
    near = [declared.nearest(here)] if here else []
    drawn = [
        capability
        for rule in candidate.rules
        for condition in (*rule.when, *rule.need)
        if isinstance(condition, Holds) and condition.field == "compute_capability"
        for capability in condition.constraint.choices()
        if declared.allows(capability)
    ]
    ends = [a.max for a in declared.alternatives if isinstance(a, Range) and a.max is not None]
    built = (capability for capability in reversed(HARDWARE) if declared.allows(capability))
    found = (*near, *declared.choices(), *drawn, *ends, *built)
    others = dict.fromkeys(c for c in found if c is not None and c != here)
    # Existing hardware before capabilities that a range admits and nobody has built. The sort is stable.
    return tuple(sorted(others, key=lambda c: ComputeCapability(c.major, c.minor) not in HARDWARE))


def _other_version(candidate: Candidate, objections: tuple[Reason, ...]) -> str:
    texts = [str(reason.because) for reason in objections if reason.code == "rule" and "installed" in reason.field]
    action = f"install another version ({'; '.join(texts)})" if texts else "install another version"
    return "; ".join(filter(None, (candidate.fix, action)))


def _none(objections: tuple[Reason, ...], request: Request) -> Fix:
    """Say what of the model refuses every fix; where nothing of it does, what no change of the rest avoids."""
    decisive = [reason for reason in objections if _is_about_model(reason)] or objections
    lacks, needs = {}, {}
    for reason in decisive:
        if reason.code == "work":
            needs[reason.field] = f"fewer choices: {reason.because}"
            continue
        because = f" ({reason.because})" if reason.code == "rule" and reason.because else ""
        if reason.supported and reason.code == "rule" and reason.field not in request.requested_names:
            needs[reason.supported] = f"{reason.supported}{because}"
        else:
            lacks[reason.requested] = f"{reason.requested}{because}"
    return Fix(lacks=tuple(lacks.values()), needs=tuple(needs.values()))


def _is_about_model(reason: Reason) -> bool:
    return any(part in FIELDS and FIELDS[part].kind in ("model", "derived") for part in reason.field.split(" and "))
