"""
The measured times of a whole model: whether all of its kinds of layers can be compared, and what each candidate costs.

A kind's times are compared only if every candidate that could be chosen was measured, and only on batches that were
measured for all kinds. Else each kind keeps its choice by rank, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from attnplug.evidence.times import levelled, phases_of, relative_times, weights_of
from attnplug.negotiation.ranking import preference_of
from attnplug.request.settings import names_of_pair
from attnplug.selection.assignment import Option
from attnplug.selection.select import listed_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from attnplug.evidence.profile import ProfileEntry
    from attnplug.evidence.times import Measured
    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import CacheTerms
    from attnplug.selection.deciding import Kind

_BY_HAND: Final = "one call"
_IN_GRAPHS: Final = ("decode", "verify")


@frozen(eq=False)
class _Batch:
    """
    The times of a kind for one batch.

    Attributes:
        phase: The phase; empty for a table that is written by hand.
        name: The batch in words: ``64 x 4k decode``.
        times: Microseconds of a call by candidate.
        compared: The same with those equal that are within the margin of the fastest.
        graphs: Whether each candidate ran in a CUDA graph.
        rejected: The candidates whose result was wrong, or that failed.
    """

    phase: str
    name: str
    times: Mapping[str, float]
    compared: Mapping[str, float]
    graphs: Mapping[str, bool] = field(factory=dict)
    rejected: Collection[str] = ()


_Key = tuple[str, tuple[int, int]]  # phase and bucket
_Table = Mapping[_Key, Mapping["int | None", _Batch]]  # by the block size that was measured; None: each its own


@frozen
class Incomparable:
    """
    Why the times of a model are not compared.

    Attributes:
        reason: The reason, for people.
    """

    reason: str


@frozen(eq=False)
class Options:
    """
    What is compared.

    Attributes:
        kinds: The options of each kind.
        level: The profile: ``local`` or ``shipped``.
    """

    kinds: tuple[tuple[Option, ...], ...]
    level: str


def options_of(kinds: Sequence[Kind], usual: Sequence[Evaluation]) -> Options | Incomparable:
    """
    Return the options of each kind with their costs, or why they are not compared.

    Args:
        kinds: The kinds.
        usual: For each kind the choice by rank. Candidates behind it in the list of backends need no time.
    """
    level = "local" if any(kind.found.times.local for kind in kinds) else "shipped"
    tables = []
    for kind in kinds:
        table = _table(kind, level)
        if isinstance(table, Incomparable):
            return table
        tables.append(table)
    batches = _common_batches(kinds, tables)
    if isinstance(batches, Incomparable):
        return batches
    tables = [{key: table[key] for key in batches if key in table} for table in tables]
    for kind, table, pick in zip(kinds, tables, usual, strict=True):
        missing = next(_unmeasured(kind, table, pick), None)
        if missing is not None:
            return Incomparable(f"{missing} is not measured for {kind.name}")
    return Options(tuple(tuple(each) for each in _options(kinds, tables, batches)), level)


def _table(kind: Kind, level: str) -> _Table | Incomparable:
    """Return the batches that were measured for a kind."""
    times = kind.found.times
    measured = next((each for each in times.measured if each.level == level), None)
    if measured is not None and measured.between:
        return Incomparable(f"{kind.name}: {measured.between}, which gives an order and no times")
    if measured is not None:
        return _of_entries(measured)
    if level == "local" and times.local:
        return {("", (0, 0)): {None: _Batch("", _BY_HAND, times.local, levelled(times.local))}}
    return Incomparable(f"{kind.name} {'has' if kind.layers == 1 else 'have'} no times in the {level} profile")


def _of_entries(measured: Measured) -> _Table:
    found: dict[_Key, dict[int | None, _Batch]] = {}
    for entry in measured.entries:
        batches = found.setdefault((entry.phase, entry.bucket), {})
        size, made = entry.requirements.block_size, _batch(entry)
        kept = batches.get(size)
        batches[size] = made if kept is None else _slower(kept, made)
    return found


def _batch(entry: ProfileEntry) -> _Batch:
    least = min(time.layer_us for time in entry.times.values())
    return _Batch(
        entry.phase,
        entry.shape,
        {id_: time.layer_us for id_, time in entry.times.items()},
        {id_: ratio * least for id_, ratio in relative_times(entry).items()},
        {id_: time.in_graph for id_, time in entry.times.items()},
        tuple(entry.rejected),
    )


def _slower(one: _Batch, other: _Batch) -> _Batch:
    """Return the worse times of two measurements of one bucket, such as of windows of nearly the same length."""
    both = one.times.keys() & other.times.keys()
    return _Batch(
        one.phase,
        one.name,
        {id_: max(one.times[id_], other.times[id_]) for id_ in both},
        {id_: max(one.compared[id_], other.compared[id_]) for id_ in both},
        {id_: one.graphs[id_] and other.graphs[id_] for id_ in both},
        (*one.rejected, *other.rejected),
    )


def _common_batches(kinds: Sequence[Kind], tables: Sequence[_Table]) -> list[_Key] | Incomparable:
    """Return the batches that were measured for every kind that has their phase."""
    found: list[_Key] = []
    for phase in sorted({phase for table in tables for phase, _ in table}):
        having = [
            (kind, {key for key in table if key[0] == phase})
            for kind, table in zip(kinds, tables, strict=True)
            if not phase or phase in phases_of(kind.found.request.requirements)
        ]
        common = set.intersection(*(keys for _, keys in having))
        if not common:
            lacking = next((kind for kind, keys in having if not keys), having[-1][0])
            return Incomparable(f"{phase or _BY_HAND} is not measured for {lacking.name} on the batches of the others")
        found += sorted(common)
    return found


def _unmeasured(kind: Kind, table: _Table, usual: Evaluation) -> Iterator[str]:
    """Yield the candidates that could be chosen instead and have no time. Those that were rejected cannot."""
    request = kind.found.request
    listed = listed_for(request.settings.backend, request)
    bound = preference_of(usual.candidate, listed)
    rejected = {id_ for sizes in table.values() for batch in sizes.values() for id_ in batch.rejected}
    for each in kind.found.ranked.evaluations:
        ahead = all(own <= most for own, most in zip(preference_of(each.candidate, listed), bound, strict=True))
        measured = all(any(each.candidate.id in batch.times for batch in sizes.values()) for sizes in table.values())
        if ahead and not measured and (each.candidate.id not in rejected or each.candidate is usual.candidate):
            yield each.candidate.id


def _options(kinds: Sequence[Kind], tables: Sequence[_Table], batches: Sequence[_Key]) -> Iterator[list[Option]]:
    weights = _weights(kinds, tables, batches)
    for kind, table in zip(kinds, tables, strict=True):
        found: list[Option] = []
        for rank, each in enumerate(kind.found.ranked.evaluations):
            found += _of_candidate(kind, table, weights, rank, each)
        yield found


def _weights(kinds: Sequence[Kind], tables: Sequence[_Table], batches: Sequence[_Key]) -> dict[_Key, float]:
    """
    Return what a microsecond counts, by batch. A batch's times are relative to those of a step in which every kind has
    its fastest candidate, so that long batches do not outweigh short ones.
    """
    of_phases = weights_of({phase for phase, _ in batches}) if batches[0][0] else {"": 1.0}
    count = {phase: sum(each == phase for each, _ in batches) for phase, _ in batches}
    weights = {}
    for key in batches:
        least = sum(
            kind.calls(key[0]) * min(min(batch.times.values()) for batch in table[key].values())
            for kind, table in zip(kinds, tables, strict=True)
            if key in table
        )
        weights[key] = of_phases[key[0]] / count[key[0]] / least
    return weights


def _of_candidate(
    kind: Kind, table: _Table, weights: Mapping[_Key, float], rank: int, evaluation: Evaluation
) -> Iterator[Option]:
    """Yield the options of a candidate: for each block size that was measured, and for all others."""
    wanted = evaluation.request.requirements
    late = "block_size" in wanted.late
    sizes = {size for batches in table.values() for size in batches if size is not None and not late}
    accepted = evaluation.accepted_terms() if wanted.paged else ()
    listed = listed_for(evaluation.request.settings.backend, evaluation.request)
    place, built_in = preference_of(evaluation.candidate, listed)
    for size in (*sorted(sizes), None):
        terms = _of_size(accepted, size, frozenset(sizes))
        found = [(key, _at(batches, size, evaluation.candidate.id)) for key, batches in table.items()]
        if (wanted.paged and not terms) or any(batch is None for _, batch in found):
            continue
        own = {key: batch for key, batch in found if batch is not None}
        yield Option(
            evaluation,
            _ids(evaluation),
            sum(
                weights[key] * kind.calls(key[0]) * batch.compared[evaluation.candidate.id]
                for key, batch in own.items()
            ),
            terms if wanted.paged else None,
            place,
            kind.layers * built_in,
            kind.layers * rank,
            _graphs(own.values(), evaluation.candidate.id),
            {batch.name: kind.calls(key[0]) * batch.times[evaluation.candidate.id] for key, batch in own.items()},
        )


@lru_cache(maxsize=32)
def _of_size(accepted: tuple[CacheTerms, ...], size: int | None, sizes: frozenset[int]) -> frozenset[CacheTerms]:
    """Return the terms with a block size; without one, those with none of these sizes."""
    return frozenset(each for each in accepted if (each[0] not in sizes if size is None else each[0] == size))


def _at(batches: Mapping[int | None, _Batch], size: int | None, id_: str) -> _Batch | None:
    """Return the measurement with a block size; without one, that with the size that each candidate prefers."""
    return next((batches[each] for each in (size, None) if each in batches and id_ in batches[each].times), None)


def _graphs(batches: Collection[_Batch], id_: str) -> tuple[bool | None, bool | None]:
    own = [[batch.graphs[id_] for batch in batches if batch.phase == phase] for phase in _IN_GRAPHS]
    first, second = (any(each) if each else None for each in own)
    return first, second


def _ids(evaluation: Evaluation) -> tuple[str, str]:
    first, *rest = names_of_pair(evaluation.candidate.id) or (evaluation.candidate.id,)
    return first, rest[0] if rest else first
