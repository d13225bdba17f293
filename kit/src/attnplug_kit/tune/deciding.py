"""The statistics of `attnplug tune`, as functions of samples: nothing here measures."""

from __future__ import annotations

import statistics
from itertools import permutations
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from attnplug.evidence import levelled, phase_scores, relative_times, total_scores
from attnplug.negotiation import measured_pairs, routes
from attnplug.request import PAIR, names_of_pair

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from attnplug.evidence import ProfileEntry
    from attnplug.request import Requirements

LEAST_ROUNDS: Final = 7
"""Rounds at least: a median of fewer is moved by single disturbances."""

HOPELESS: Final = 1.5
"""A candidate that takes so much longer than the best in the screening is not measured further."""

_CLOCK: Final = 0.03
"""A round does not count if the probe, a fixed piece of work, takes longer or shorter by this part than usual."""


_DECODES: Final = ("decode", "verify")


@frozen
class Proposal:
    """
    A routed pair that may be faster than every single candidate of a layer.

    Attributes:
        pair: The pair.
        best: The best single candidate, which serves all batches.
        gain: The expected advantage over `best`: a part of its time, phases weighted.
    """

    pair: str
    best: str
    gain: float

    @property
    def singles(self) -> tuple[str, ...]:
        """The candidates to measure beside the pair: its own two, and the best single one."""
        return tuple(dict.fromkeys((*(names_of_pair(self.pair) or ()), self.best)))


def proposals(layer: Requirements, entries: Sequence[ProfileEntry]) -> tuple[Proposal, ...]:
    """
    Return the routed pairs whose expected gain exceeds the margin, the best first: the times of decodes are those of
    one candidate, the times of other batches those of another.

    Args:
        layer: The layer.
        entries: Its entries.
    """
    phases = {name: _singles(found) for name, found in phase_scores(entries, layer).items()}
    scores = total_scores(phases)
    if not routes(layer) or not scores or not set(_DECODES) & set(phases) or not set(phases) - set(_DECODES):
        return ()
    expected = {}
    for decode, rest in permutations(scores, 2):
        sides = {name: decode if name in _DECODES else rest for name in phases}
        (expected[f"{decode}{PAIR}{rest}"],) = total_scores(
            {name: {PAIR: phases[name][id_]} for name, id_ in sides.items()}
        ).values()
    best = min(scores, key=lambda id_: (scores[id_], id_))
    return tuple(
        Proposal(pair, best, 1 - expected[pair] / scores[best]) for pair in measured_pairs({**scores, **expected})
    )


def pair_gain(layer: Requirements, entries: Sequence[ProfileEntry], pair: str) -> tuple[float, bool]:
    """
    Return the measured advantage of a pair over the best single candidate, and whether selection follows it.

    Args:
        layer: The layer.
        entries: Its entries.
        pair: A pair with a time in all of them.
    """
    scores = total_scores(phase_scores(entries, layer))
    return 1 - scores[pair] / min(_singles(scores).values()), pair in measured_pairs(levelled(scores))


@frozen
class Difference:
    """
    A measurement of which two runs have different choices.

    Attributes:
        what: The batch and the layer.
        choices: The choice of each run.
        is_margin: Whether the two are within the margin of each other in a run: noise decides between them.
    """

    what: str
    choices: tuple[str, str]
    is_margin: bool


def differences(one: Sequence[ProfileEntry], other: Sequence[ProfileEntry]) -> tuple[tuple[Difference, ...], int]:
    """
    Return where two runs of one device choose differently, and the number of measurements that both have.

    Args:
        one: The entries of a run.
        other: The entries of the other run.
    """
    theirs = {_measurement(entry): entry for entry in other}
    both = [(entry, theirs[key]) for entry in one if (key := _measurement(entry)) in theirs]
    found = []
    for pair in both:
        first, second = (winner(entry)[0] for entry in pair)
        if first != second:
            is_margin = any(_are_close(entry, first, second) for entry in pair)
            what = f"{pair[0].shape}, {pair[0].requirements}"
            found.append(Difference(what, (first, second), is_margin))
    return tuple(found), len(both)


def _measurement(entry: ProfileEntry) -> tuple[Hashable, ...]:
    return entry.device, entry.requirements, entry.phase, entry.bucket


def _are_close(entry: ProfileEntry, first: str, second: str) -> bool:
    """Whether one of two candidates is as fast as the other within their margin; not where one was not measured."""
    times = {id_: entry.times[id_] for id_ in (first, second) if id_ in entry.times}
    return len(times) == 2 and set(relative_times(evolve(entry, times=times)).values()) == {1.0}


def _singles(scores: Mapping[str, float]) -> dict[str, float]:
    return {id_: score for id_, score in scores.items() if names_of_pair(id_) is None}


def survivors(screened: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Return the candidates that may still win, by the least of a few samples of each, in the order given."""
    best = min(map(min, screened.values()))
    return tuple(id_ for id_, samples in screened.items() if min(samples) <= HOPELESS * best)


def steady_rounds(probe: Sequence[float]) -> tuple[int, ...]:
    """
    Return the rounds in which the clock was the usual one, by the probe's times.

    All of them, where fewer than half are: the clock is never steady on such a machine, and the spread shows it.
    """
    usual = statistics.median(probe)
    kept = tuple(index for index, time in enumerate(probe) if abs(time - usual) <= _CLOCK * usual)
    return kept if 2 * len(kept) > len(probe) else tuple(range(len(probe)))


def summary(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median, and half the distance between the quartiles relative to it."""
    median = statistics.median(samples)
    if len(samples) < 2:
        return median, 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return median, (high - low) / 2 / median


def winner(entry: ProfileEntry) -> tuple[str, bool]:
    """
    Return the fastest candidate and whether its advantage exceeds the margin; the default, and false, where it doesn't.
    A pair runs the kernels of one of its candidates here, and is left out.
    """
    relative = _singles(relative_times(entry))
    equal = [id_ for id_, time in relative.items() if time == 1.0]
    if entry.default in equal:
        return entry.default, len(equal) == 1 and len(relative) > 1
    fastest = min(equal, key=lambda id_: (entry.times[id_].layer_us, id_))
    return fastest, True
