"""Groups the requests of a batch into rectangles of queries and keys, from host lengths alone: integers, no tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence


@frozen
class Span:
    """
    What one request, or one chunk of it, computes: its last rows over its last keys. Rows and keys that nothing needs
    are cut off.

    Attributes:
        request: Its index in the batch.
        rows: Query rows that attend something.
        keys: Keys that some row attends, up to the last one; the last row stands there.
        first_row: The first of the rows, counted in the batch's query rows.
        first_key: The first of the keys, counted in the request.
        fresh: Whether all keys come with this step's call, so that they need not be fetched from the cache.
    """

    request: int
    rows: int
    keys: int
    first_row: int
    first_key: int
    fresh: bool


@frozen
class Budget:
    """
    How large a rectangle may become, and what it may waste.

    Attributes:
        keys: Most keys of a group, padded ones included: the size of the gather buffers.
        scores: Most elements of a mask that requests of different lengths need.
        slack: Padded scores that cost as much as one more kernel call.
        ragged_rows: Most rows of a request that shares a group with requests of other lengths.
        least_keys: Keys that every group is padded to.
        even: Whether requests of one size share a group whatever its mask takes: it needs none of its own then.
        divisible: Whether requests of one size share a group whatever their keys take: they are gathered in parts.
    """

    keys: int
    scores: int
    slack: int
    ragged_rows: int
    least_keys: int = 1
    even: bool = True
    divisible: bool = False


def spans_of(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: tuple[int, int],
    *,
    causal: bool,
    chunk: int | None = None,
) -> tuple[list[Span], list[tuple[int, int]]]:
    """
    Return the spans of a batch, and the row ranges ``(start, end)`` that attend nothing.

    Rows stand at the end of their sequence. A row attends nothing where its request has no keys, or where there are
    more queries than keys and its position lies before all of them. With chunks a request has a span per chunk that its
    rows touch: each is a sequence of its own, whose last row stands at its last key like any other's.

    Args:
        query_lens: Query rows per request.
        seq_lens: Keys per request.
        window: Positions seen to the left and to the right, -1 for all.
        causal: Whether no later position is seen.
        chunk: Positions per chunk, beyond which nothing is seen; None for no chunks.
    """
    left, right = window
    reach = 0 if causal or chunk else right
    spans, empty = [], []
    start = 0
    for request, (rows, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blind = 0
        if not keys:
            blind = rows
        elif reach >= 0:
            blind = min(rows, max(0, rows - keys - reach))
        if blind:
            empty.append((start, start + blind))
        if rows > blind:
            position = keys - rows + blind
            first_key = max(0, position - left) if left >= 0 else 0
            if chunk is None:
                fresh = 1 < rows == keys
                spans.append(Span(request, rows - blind, keys - first_key, start + blind, first_key, fresh))
            else:
                spans += _chunk_spans(request, (position, keys), start + blind - position, left, chunk)
        start += rows
    return spans, empty


def _chunk_spans(request: int, positions: tuple[int, int], shift: int, left: int, chunk: int) -> list[Span]:
    """Return a span per chunk that rows at these positions touch; row and position differ by `shift`."""
    spans = []
    position, end = positions
    while position < end:
        begin = position - position % chunk
        last = min(end, begin + chunk)
        first_key = max(begin, position - left) if left >= 0 else begin
        rows, keys = last - position, last - first_key
        spans.append(Span(request, rows, keys, shift + position, first_key, fresh=1 < rows == keys))
        position = last
    return spans


def group_spans(spans: Sequence[Span], budget: Budget) -> list[list[Span]]:
    """
    Return groups that are computed by one call each, padded to their longest member.

    A span joins the group before it while what it pads costs less than a call of its own would. Spans of the same size
    pad nothing. The order inside a group is that of the batch.
    """
    groups: list[list[Span]] = []
    most_rows = most_keys = used = 0
    for span in sorted(spans, key=lambda s: (s.fresh, s.rows, s.keys)):
        rows, keys = max(most_rows, span.rows), max(most_keys, span.keys)
        if groups and _fits(groups[-1], span, rows, keys, used, budget):
            groups[-1].append(span)
        else:
            groups.append([span])
            rows, keys, used = span.rows, span.keys, 0
        used += span.rows * span.keys
        most_rows, most_keys = rows, keys
    return [sorted(group, key=lambda s: s.first_row) for group in groups]


def _fits(group: list[Span], span: Span, rows: int, keys: int, used: int, budget: Budget) -> bool:
    size = len(group) + 1
    last = group[-1]
    if last.fresh != span.fresh:
        return False
    even = (last.rows, last.keys) == (span.rows, span.keys) and used == len(group) * span.rows * span.keys
    if even and budget.divisible:
        return True
    if size * max(keys, budget.least_keys) > budget.keys:
        return False
    if even:
        return budget.even or size * rows * keys <= budget.scores
    padded = size * rows * keys
    wasted = padded - used - span.rows * span.keys
    return rows <= budget.ragged_rows and padded <= budget.scores and wasted <= budget.slack
