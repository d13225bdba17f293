"""The kinds of layers that limit a plan: what the other layers would have without them, and how to get it."""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.evaluation import evaluate
from attnplug.negotiation.matching import Request
from attnplug.negotiation.ranking import AUTO
from attnplug.request.domains import GRAPH_LEVELS
from attnplug.selection.deciding import Kind, assign
from attnplug.selection.select import evaluate_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import CacheTerms
    from attnplug.selection.deciding import Assigned
    from attnplug.selection.plan import Decided

_TRIES: Final = 200  # candidates, or combinations of them, that are tried to lift a limit


@frozen
class Change:
    """
    What other layers would have without the limiting ones.

    Attributes:
        term: A term of the KV cache, ``cudagraph``, or ``backend``: the candidate.
        layers: The other layers, for ``backend``; else empty: it holds for all.
        value: What they have.
        without: What they would have.
    """

    term: str
    layers: tuple[str, ...]
    value: Any
    without: Any

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"term": self.term, "layers": list(self.layers), "value": self.value, "without": self.without}


@frozen
class Limit:
    """
    A kind of layers that limits the others.

    Attributes:
        layers: Its layers.
        changes: What the others would have without it.
        lifts: What would lift the limit, checked to work: a step each, any of which does. Empty where nothing that is
            known does.
    """

    layers: tuple[str, ...]
    changes: tuple[Change, ...]
    lifts: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "layers": list(self.layers),
            "changes": [change.to_dict() for change in self.changes],
            "lifts": list(self.lifts),
        }


def limits_of(decided: Decided) -> tuple[Limit, ...]:
    """
    Return the kinds of layers that limit a plan.

    Every kind is left out in turn, and the others are decided again. The kinds with the least graph level are left out
    together: none of several limits it alone.
    """
    return tuple(_limits(decided))


def _limits(decided: Decided) -> Iterator[Limit]:
    levels = [_level(pick) for pick in decided.picks]
    weak = [index for index, level in enumerate(levels) if level == min(levels)]
    if len(weak) > 1 and len(weak) < len(levels):
        yield from _limit(decided, weak, [_change_of_level(levels)])
    for index in range(len(levels)):
        own = [_change_of_level(levels)] if weak == [index] and len(levels) > 1 else []
        yield from _limit(decided, [index], own)


def _change_of_level(levels: Sequence[int]) -> Change:
    better = min(level for level in levels if level > min(levels))
    return Change("cudagraph", (), GRAPH_LEVELS[min(levels)], GRAPH_LEVELS[better])


def _limit(decided: Decided, left_out: Sequence[int], changes: list[Change]) -> Iterator[Limit]:
    """Yield the limit of some kinds, if there is one."""
    others = [kind for index, kind in enumerate(decided.kinds) if index not in left_out]
    free = assign(others) if others else None
    if free is None:
        return
    level = changes[0].without if changes else GRAPH_LEVELS[0]
    if len(left_out) == 1:
        changes = [*changes, *_changes(decided, left_out[0], others, free)]
    if changes:
        names = tuple(name for index in left_out for name in decided.kinds[index].names)
        yield Limit(names, tuple(changes), tuple(_lifts(decided, left_out, free.picks, level)))


def _changes(decided: Decided, index: int, others: Sequence[Kind], free: Assigned) -> Iterator[Change]:
    own = decided.picks[index]
    kept = [pick for pick in decided.picks if pick is not own]
    now, then = _terms(kept), _terms(free.picks)
    if now is not None and then is not None and own.request.requirements.paged and not own.accepts(then):
        for name, value, without in zip(CACHE_TERMS, now, then, strict=True):
            if value != without:
                yield Change(name, (), value, without)
    for other, pick, alone in zip(others, kept, free.picks, strict=True):
        if pick.candidate is not alone.candidate:
            yield Change("backend", other.names, pick.candidate.id, alone.candidate.id)


def _terms(picks: Sequence[Evaluation]) -> CacheTerms | None:
    """Return the terms that picks share; None where none has a paged KV cache, or its block size is late."""
    agreed = next((pick.agreement for pick in picks if pick.request.requirements.paged), None)
    if agreed is None or agreed.block_size is None:
        return None
    return agreed.block_size, agreed.kv_layout, agreed.kv_cache_form


def _level(pick: Evaluation) -> int:
    return GRAPH_LEVELS.index(pick.agreement.cudagraph) if pick.agreement is not None else 0


def _lifts(decided: Decided, left_out: Sequence[int], free: Sequence[Evaluation], level: str) -> Iterator[str]:
    """Yield, of each kind of step, the first that gives the others what they would have without the limits."""
    relaxed = [_without_terms(each) for each in (*(decided.picks[index] for index in left_out), *free)]
    terms = _serving(relaxed, level)
    if terms is not None and terms != _terms(decided.picks):
        yield f"request {' '.join(f'{name}={value}' for name, value in zip(CACHE_TERMS[:2], terms[:2], strict=True))}"
    kinds = [decided.kinds[index] for index in left_out]
    permitted = _replaced([[each for each in kind.found.others if each.serves] for kind in kinds], free, level)
    if permitted:
        ids = ", ".join(dict.fromkeys(each.candidate.id for each in permitted))
        yield f"permit {ids} in the list of backends"
    if level != GRAPH_LEVELS[0]:
        yield from islice(_preferences(decided, kinds, level), 1)
    if decided.assume_installed:
        return
    found = [evaluate_all(decided.state, kind.found.request, assume_installed=True) for kind in kinds]
    assumed = _replaced(
        [[each for each in one.ranked.evaluations if each.candidate.assumed is not None] for one in found], free, level
    )
    if assumed:
        steps = [
            step for each in assumed if each.candidate.assumed is not None for step in each.candidate.assumed.steps()
        ]
        ids = ", ".join(dict.fromkeys(each.candidate.id for each in assumed))
        yield f"{', then '.join(dict.fromkeys(steps))} (for {ids})"


def _preferences(decided: Decided, kinds: Sequence[Kind], level: str) -> Iterator[str]:
    """Yield the candidates that give the whole model the graph level if they are the first of the list."""
    ranked = (each.candidate for kind in kinds for each in kind.found.ranked.evaluations)
    for id_ in dict.fromkeys(candidate.id for candidate in ranked if not candidate.built_in):
        preferred = assign([_preferring(decided, kind, id_) for kind in decided.kinds])
        if preferred is not None and min(map(_level, preferred.picks)) >= GRAPH_LEVELS.index(level):
            yield f"name {id_} first in the list of backends"


def _preferring(decided: Decided, kind: Kind, id_: str) -> Kind:
    request = kind.found.request
    settings = evolve(request.settings, backend=(id_, *(request.settings.backend or (AUTO,))))
    own = Request(request.requirements, request.device, settings, request.origins)
    return Kind(kind.names, evaluate_all(decided.state, own, assume_installed=decided.assume_installed), kind.drafted)


def _replaced(
    offered: Sequence[Sequence[Evaluation]], free: Sequence[Evaluation], level: str
) -> tuple[Evaluation, ...]:
    """Return an evaluation for each limiting kind with which all have the level and share terms; empty without any."""
    found = (each for each in islice(product(*offered), _TRIES) if _serving((*each, *free), level) is not None)
    return next(found, ())


def _without_terms(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation of the same candidate for a request that leaves block size and layout open."""
    request = evaluation.request
    open_terms = {name: None for name in CACHE_TERMS[:2] if getattr(request.requirements, name) is not None}
    if not open_terms or evaluation.candidate.roles:
        return evaluation
    found = Request(request.requirements.evolve(**open_terms), request.device, request.settings)
    return evaluate(evaluation.candidate, found)


def _serving(evaluations: Sequence[Evaluation], level: str) -> CacheTerms | None:
    """Return the first terms that all of them accept and under which all have at least this graph level."""
    paged = [each for each in evaluations if each.request.requirements.paged and each.serves]
    rest = [each for each in evaluations if each not in paged]
    least = GRAPH_LEVELS.index(level)
    if not paged or any(not each.serves or _level(each) < least for each in rest):
        return None
    common = set.intersection(*(set(each.accepted_terms()) for each in paged))
    tried = (terms for terms in paged[0].accepted_terms() if terms in common)
    return next((t for t in tried if all(_level(each.with_cache_terms(t)) >= least for each in paged)), None)
