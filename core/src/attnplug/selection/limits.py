"""The kinds of layers that limit a plan: what the other layers would have without them, and how to get it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.evaluation import evaluate
from attnplug.negotiation.matching import Request
from attnplug.request.domains import GRAPH_LEVELS
from attnplug.selection.deciding import assign
from attnplug.selection.select import evaluate_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import CacheTerms
    from attnplug.selection.deciding import Assigned, Kind
    from attnplug.selection.plan import Decided


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

    Every kind is left out in turn, and the others are decided again.
    """
    return tuple(_limits(decided))


def _limits(decided: Decided) -> Iterator[Limit]:
    for index, kind in enumerate(decided.kinds):
        others = [each for each in decided.kinds if each is not kind]
        free = assign(others) if others else None
        if free is None:
            continue
        changes = tuple(_changes(decided, index, others, free))
        if changes:
            level = next((change.without for change in changes if change.term == "cudagraph"), GRAPH_LEVELS[0])
            yield Limit(kind.names, changes, tuple(_lifts(decided, index, free.picks, level)))


def _changes(decided: Decided, index: int, others: Sequence[Kind], free: Assigned) -> Iterator[Change]:
    own = decided.picks[index]
    kept = [pick for pick in decided.picks if pick is not own]
    levels = [_level(pick) for pick in decided.picks]
    # Of several weak kinds none alone limits the level, and all of them do.
    better = [level for level in levels if level > min(levels)]
    if better and levels[index] == min(levels):
        yield Change("cudagraph", (), GRAPH_LEVELS[min(levels)], GRAPH_LEVELS[min(better)])
    now, then = _terms(kept), _terms(free.picks)
    if now is not None and then is not None and own.request.requirements.paged and then not in own.accepted_terms():
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


def _lifts(decided: Decided, index: int, free: Sequence[Evaluation], level: str) -> Iterator[str]:
    """Yield, of each kind of change, the first that gives the others what they would have without this kind."""
    kind, own = decided.kinds[index], decided.picks[index]
    relaxed = [_without_terms(each) for each in (own, *free)]
    terms = _serving(relaxed, level)
    if terms is not None and terms != _terms(decided.picks):
        yield f"request {' '.join(f'{name}={value}' for name, value in zip(CACHE_TERMS[:2], terms[:2], strict=True))}"
    for each in kind.found.others:
        if each.serves and _serving((each, *free), level) is not None:
            yield f"permit {each.candidate.id} in the list of backends"
            break
    if decided.assume_installed:
        return
    for each in evaluate_all(decided.state, kind.found.request, assume_installed=True).ranked.evaluations:
        if each.candidate.assumed is not None and _serving((each, *free), level) is not None:
            yield f"{', then '.join(each.candidate.assumed.steps())} (for {each.candidate.id})"
            break


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
