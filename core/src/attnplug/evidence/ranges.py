"""
The fields whose evidence is a range: what lies between the smallest and the largest value of a run is verified by it.

Sizes of heads and of blocks have no ranges. Kernels are written for sizes, and what holds at 64 and at 128 need not
hold at 72.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HEADS: Final = ("num_q_heads", "num_kv_heads", "gqa_ratio")
"""Fields of every request. They need evidence though no manifest declares them: runs of format 2 have recorded them."""

RANGES: Final = frozenset({*HEADS, "sliding_window", "attention_chunk", "logits_soft_cap", "decode_query_len"})
"""The fields of requests that are compared with a range. A window or a chunk counts with longer sequences only."""

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
