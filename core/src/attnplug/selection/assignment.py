"""
The assignment of candidates to the kinds of layers of a model that takes the least measured time.

A kind is the layers that request the same. All paged kinds share the terms of one KV cache, and a step runs its decodes
in a CUDA graph as a whole or not at all. Imported only where there is a profile.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import CacheTerms

MIX_GAIN: Final = 0.05
"""
The part of the time by which another candidate in the same phase has to lower it: another backend, or another variant,
which has its own metadata and plan in each step. That cost shows in no layer's time.
"""

MARGIN: Final = 0.02
"""The least advantage over the assignment by rank that counts, as a part of the time."""

_GRAPHS: Final = tuple(product((True, False), repeat=2))


@frozen(eq=False)
class Option:
    """
    A candidate for one kind of layers, with its measured cost.

    Attributes:
        evaluation: The candidate's evaluation.
        ids: The candidate of pure decodes, and that of all other batches: two only of a routed pair.
        cost: The time of all layers of the kind, weighted over phases and batches; any unit that all kinds share.
        terms: The terms of the KV cache for which the cost holds; None without a paged KV cache.
        place: The place in the list of permitted backends.
        built_in: The layers that it puts on the built-in backend.
        rank: The place by rank, which decides between equal costs.
        graphs: Whether decodes, and verifications of drafts, were measured in a CUDA graph; None: not measured.
        times: Microseconds of all layers of the kind, by batch.
    """

    evaluation: Evaluation
    ids: tuple[str, str]
    cost: float
    terms: frozenset[CacheTerms] | None = None
    place: int = 0
    built_in: int = 0
    rank: int = 0
    graphs: tuple[bool | None, bool | None] = (None, None)
    times: Mapping[str, float] = field(factory=dict)


@frozen(order=True)
class Assignment:
    """
    An option for each kind. Assignments compare as they are preferred: by listed places, of the first kind first; by
    the layers on the built-in backend; by cost; by rank.

    Attributes:
        places: The listed place of each kind.
        built_in: The layers on the built-in backend.
        cost: The sum of the costs.
        rank: The sum of the ranks.
        options: The options.
    """

    places: tuple[int, ...] = ()
    built_in: int = 0
    cost: float = 0.0
    rank: int = 0
    options: tuple[Option, ...] = field(default=(), order=False)

    @property
    def preference(self) -> tuple[tuple[int, ...], int]:
        """What comes before every time: the listed order, and the built-in backend last."""
        return self.places, self.built_in

    @property
    def mixing(self) -> int:
        """The number of candidates of pure decodes, plus that of all other batches: at least 2."""
        return sum(len({option.ids[role] for option in self.options}) for role in (0, 1))

    @property
    def times(self) -> dict[str, float]:
        """Microseconds of all layers, by batch."""
        found: dict[str, float] = {}
        for option in self.options:
            for batch, time in option.times.items():
                found[batch] = found.get(batch, 0.0) + time
        return found

    def shared(self) -> tuple[CacheTerms, ...]:
        """Return the terms that all options with a paged KV cache accept, in the order that the first one prefers."""
        paged = [option for option in self.options if option.terms is not None]
        if not paged:
            return ()
        common = frozenset.intersection(*(option.terms for option in paged if option.terms is not None))
        return tuple(terms for terms in paged[0].evaluation.accepted_terms() if terms in common)


@frozen
class Choice:
    """
    What is chosen, and what would take the least time if mixing candidates cost nothing.

    Attributes:
        chosen: The assignment.
        fastest: The assignment of least cost under the same preferences.
        usual: The assignment by rank, or None where the options lack it.
    """

    chosen: Assignment
    fastest: Assignment
    usual: Assignment | None = None


def choose(kinds: Sequence[Sequence[Option]], usual: Sequence[Evaluation] = ()) -> Choice | None:
    """
    Choose an option for each kind: exactly the least cost under one set of terms, among those that the list of
    backends prefers.

    More candidates in one phase are taken only if they lower the cost by more than `MIX_GAIN`. What capability forces
    is no choice: the comparison begins with the fewest candidates that can serve all kinds.

    Args:
        kinds: For each kind its options; several of one candidate where the cost depends on the terms.
        usual: For each kind the choice by rank, which stays unless `MARGIN` is gained.

    Returns:
        The choice; None where no options share terms, or where some run in CUDA graphs and others cannot.
    """
    found = _by_mixing(kinds)
    if not found:
        return None
    best = min(each.preference for each in found.values())
    permitted = [each for _, each in sorted(found.items()) if each.preference == best]
    chosen = permitted[0]
    for each in permitted[1:]:
        if each.cost < chosen.cost * (1 - MIX_GAIN):
            chosen = each
    kept = _usual(kinds, usual)
    if kept is not None and (kept.preference, kept.mixing) == (best, chosen.mixing):
        chosen = kept if kept.cost <= chosen.cost * (1 + MARGIN) else chosen
    return Choice(chosen, min(permitted), kept)


def _usual(kinds: Sequence[Sequence[Option]], usual: Sequence[Evaluation]) -> Assignment | None:
    """Return the assignment by rank, if it is among the options."""
    own = [
        [option for option in options if option.evaluation.candidate is each.candidate]
        for options, each in zip(kinds, usual, strict=bool(usual))
    ]
    return min(_by_mixing(own).values(), default=None) if own else None


def _by_mixing(kinds: Sequence[Sequence[Option]]) -> dict[int, Assignment]:
    """Return the best assignment for each number of candidates."""
    found: dict[int, Assignment] = {}
    for options in _alike(kinds):
        for each in _cheapest(options):
            found[each.mixing] = min(found.get(each.mixing, each), each)
    return found


def _alike(kinds: Sequence[Sequence[Option]]) -> Iterator[list[list[Option]]]:
    """Yield the options of each kind under each set of terms, in graphs and without."""
    distinct: dict[frozenset[CacheTerms], int] = {}
    of_kinds = [
        [(each, None if each.terms is None else distinct.setdefault(each.terms, len(distinct))) for each in options]
        for options in kinds
    ]
    # Terms that the same options accept are one case; what all accept is among what those of any one kind accept.
    paged = [{each.terms for each in options if each.terms is not None} for options in kinds]
    fewest = min(filter(None, paged), key=lambda sets: sum(map(len, sets)), default=set())
    numbered = tuple(distinct.items())
    cases = {tuple([n for accepted, n in numbered if terms in accepted]) for terms in set().union(*fewest)} or {()}
    largest = [case for case in map(frozenset, sorted(cases)) if not any(case < frozenset(each) for each in cases)]
    tried: set[tuple[tuple[int, ...], ...]] = set()
    for case, graphs in product(largest, _GRAPHS):
        alike = [
            [each for each, number in options if (number is None or number in case) and _fits(each, graphs)]
            for options in of_kinds
        ]
        key = tuple(tuple(map(id, options)) for options in alike)
        if all(alike) and key not in tried:
            tried.add(key)
            yield alike


def _fits(option: Option, graphs: tuple[bool, ...]) -> bool:
    return all(own in (None, each) for own, each in zip(option.graphs, graphs, strict=True))


_State = tuple[frozenset[str], frozenset[str]]  # the candidates of pure decodes, and those of all other batches


def _cheapest(kinds: Sequence[Sequence[Option]]) -> Iterator[Assignment]:
    """Yield the best assignment for each set of candidates: kind by kind, the best way to each set is kept."""
    best: dict[_State, Assignment] = {(frozenset(), frozenset()): Assignment()}
    for options in kinds:
        longer: dict[_State, Assignment] = {}
        for option in _best_of_ids(options):
            for (decodes, rests), each in best.items():
                state = decodes | {option.ids[0]}, rests | {option.ids[1]}
                kept = longer.get(state)
                if kept is None or _sum(each, option) < (kept.places, kept.built_in, kept.cost, kept.rank):
                    longer[state] = Assignment(*_sum(each, option), (*each.options, option))
        best = longer
    yield from best.values()


def _best_of_ids(options: Sequence[Option]) -> list[Option]:
    """Return the best option of each candidate: the others can be in no best assignment."""
    best: dict[tuple[str, str], Option] = {}
    for option in options:
        kept = best.setdefault(option.ids, option)
        if _own(option) < _own(kept):
            best[option.ids] = option
    return list(best.values())


def _own(option: Option) -> tuple[int, int, float, int]:
    return option.place, option.built_in, option.cost, option.rank


def _sum(before: Assignment, option: Option) -> tuple[tuple[int, ...], int, float, int]:
    """Return what an assignment is preferred by, with an option for the next kind."""
    return (
        (*before.places, option.place),
        before.built_in + option.built_in,
        before.cost + option.cost,
        before.rank + option.rank,
    )
