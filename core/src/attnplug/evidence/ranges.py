"""The fields whose evidence is a range: what lies between the smallest and the largest value of a run is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RANGES: Final = {item.name: item for item in FIELDS.values() if item.has_ranges}
"""The fields of requests that are compared with a range. A window or a chunk counts with longer sequences only."""

HEADS: Final = tuple(name for name, item in RANGES.items() if item.required or item.kind == "derived")
"""Fields of every request. They need evidence though no manifest declares them: runs of format 2 have recorded them."""

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return intervals in order, those that overlap as one."""
    found: list[Interval] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def shown(value: float, intervals: Iterable[Interval]) -> str:
    """
    Return what is verified beside a value that is in none of these intervals.

    Args:
        value: The value.
        intervals: At least one, inclusive.
    """
    parts = merged(intervals)
    if all(low == high for low, high in parts):
        return f"verified {'is' if len(parts) == 1 else 'are'} {', '.join(_texts(parts))}"
    if value > parts[-1][1]:
        return f"verified up to {parts[-1][1]}"
    if value < parts[0][0]:
        return f"verified from {parts[0][0]}"
    return f"verified are {', '.join(_texts(parts))}"


def _texts(parts: Iterable[Interval]) -> Iterator[str]:
    yield from (str(low) if low == high else f"{low} to {high}" for low, high in parts)
