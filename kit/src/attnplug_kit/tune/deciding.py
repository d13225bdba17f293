"""The statistics of `attnplug tune`, as functions of samples: nothing here measures."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from attnplug.evidence import relative_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug.evidence import ProfileEntry

LEAST_ROUNDS: Final = 7
"""Rounds at least: a median of fewer is moved by single disturbances."""

HOPELESS: Final = 1.5
"""A candidate that takes so much longer than the best in the screening is not measured further."""

_CLOCK: Final = 0.03
"""A round does not count if the probe, a fixed piece of work, takes longer or shorter by this part than usual."""


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
    """
    relative = relative_times(entry)
    equal = [id_ for id_, time in relative.items() if time == 1.0]
    if entry.default in equal:
        return entry.default, len(equal) == 1 and len(relative) > 1
    fastest = min(equal, key=lambda id_: (entry.times[id_].microseconds, id_))
    return fastest, True
