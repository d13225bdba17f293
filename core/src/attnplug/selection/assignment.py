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
"""The part of the time by which another backend in the same phase has to lower it. Mixing costs what no layer shows."""

MARGIN: Final = 0.02
"""The least advantage over the assignment by rank that counts, as a part of the time."""

_GRAPHS: Final = tuple(product((True, False), repeat=2))


@frozen(eq=False)
class Option:
    """
    A candidate for one kind of layers, with its measured cost.

    Attributes:
        evaluation: The candidate's evaluation.
        backends: The backend of pure decodes, and that of all other batches: two only of a routed pair.
        cost: The time of all layers of the kind, weighted over phases and batches; any unit that all kinds share.
        terms: The terms of the KV cache for which the cost holds; None without a paged KV cache.
        place: The place in the list of permitted backends.
        built_in: The layers that it puts on the built-in backend.
        rank: The place by rank, which decides between equal costs.
        graphs: Whether decodes, and verifications of drafts, were measured in a CUDA graph; None: not measured.
        times: Microseconds of all layers of the kind, by batch.
    """

    evaluation: Evaluation
    backends: tuple[str, str]
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
    def backends(self) -> tuple[frozenset[str], frozenset[str]]:
        """The backends of pure decodes, and those of all other batches."""
        first, second = (frozenset(option.backends[role] for option in self.options) for role in (0, 1))
        return first, second

    @property
    def mixing(self) -> int:
        """The backends of both phases, counted: the least is 2."""
        return sum(map(len, self.backends))

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

    def plus(self, option: Option) -> Assignment:
        """Return it with an option for the next kind."""
        return Assignment(
            (*self.places, option.place),
            self.built_in + option.built_in,
            self.cost + option.cost,
            self.rank + option.rank,
            (*self.options, option),
        )


@frozen
class Choice:
    """
    What is chosen, and what would take the least time if mixing backends cost nothing.

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

    More backends in one phase are taken only if they lower the cost by more than `MIX_GAIN`. What capability forces is
    no choice: the comparison begins with the fewest backends that can serve all kinds.

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
    """Return the best assignment for each number of backends."""
    found: dict[int, Assignment] = {}
    for options in _alike(kinds):
        for each in _cheapest(options):
            found[each.mixing] = min(found.get(each.mixing, each), each)
    return found


def _alike(kinds: Sequence[Sequence[Option]]) -> Iterator[list[list[Option]]]:
    """Yield the options of each kind under each set of terms, in graphs and without."""
    accepted: dict[CacheTerms, list[Option]] = {}
    for option in (option for options in kinds for option in options):
        for terms in option.terms or ():
            accepted.setdefault(terms, []).append(option)
    # Terms that the same options accept are one case. Without a paged KV cache there are no terms.
    cases = {frozenset(map(id, options)) for options in accepted.values()} or {frozenset()}
    for case, graphs in product(cases, _GRAPHS):
        alike = [[each for each in options if _fits(each, case, graphs)] for options in kinds]
        if all(alike):
            yield alike


def _fits(option: Option, case: frozenset[int], graphs: tuple[bool, bool]) -> bool:
    fits_terms = option.terms is None or id(option) in case
    return fits_terms and all(own in (None, each) for own, each in zip(option.graphs, graphs, strict=True))


def _cheapest(kinds: Sequence[Sequence[Option]]) -> Iterator[Assignment]:
    """Yield the best assignment for each set of backends: kind by kind, the best way to each set is kept."""
    best: dict[tuple[frozenset[str], frozenset[str]], Assignment] = {(frozenset(), frozenset()): Assignment()}
    for options in kinds:
        longer: dict[tuple[frozenset[str], frozenset[str]], Assignment] = {}
        for option in _of_backends(options):
            for (decodes, rests), each in best.items():
                key = decodes | {option.backends[0]}, rests | {option.backends[1]}
                made = each.plus(option)
                longer[key] = min(longer.get(key, made), made)
        best = longer
    yield from best.values()


def _of_backends(options: Sequence[Option]) -> list[Option]:
    """Return the best option of each backend, or of each two: the others can be in no best assignment."""
    best: dict[tuple[str, str], Option] = {}
    for option in options:
        kept = best.setdefault(option.backends, option)
        if _own(option) < _own(kept):
            best[option.backends] = option
    return list(best.values())


def _own(option: Option) -> tuple[int, int, float, int]:
    return option.place, option.built_in, option.cost, option.rank
