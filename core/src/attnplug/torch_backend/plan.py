"""
Turns a batch into a plan: which rows meet which keys, in which kernel calls, for all layers of a plan key.

Lengths are read from the batch's CPU tensors; only page numbers come from the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from attrs import evolve, field, frozen

from attnplug.torch_backend.masks import RequestCells, Spans, Tile, Tiler
from attnplug.torch_backend.sources import CallKeys, Keys, blocks_of, index_on, slots_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.torch_backend.builder import PlanParams
    from attnplug.torch_backend.sdpa import TileKernel


@frozen
class Segment:
    """
    The rows and keys that one request, or one chunk of it, computes: only those that are needed.

    Attributes:
        request: Its index in the batch.
        rows: Query rows that attend to a key.
        keys: Keys that some row attends to, up to the last one; the last row is at the position of the last key.
        first_row: The first of the rows, counted in the batch's query rows.
        first_key: The first of the keys, counted in the request.
        from_call: Whether all keys come with this step's call, so that the KV cache need not be read.
    """

    request: int
    rows: int
    keys: int
    first_row: int
    first_key: int
    from_call: bool


@frozen(eq=False)
class Rectangle:
    """
    Segments that are computed together, padded to the longest.

    Attributes:
        segments: The members, in the order of the batch.
        rows: Query rows of each, padded.
        keys: Keys of each, padded.
        uniform: Whether all members have the same rows and keys.
    """

    segments: Sequence[Segment]
    rows: int
    keys: int
    uniform: bool

    @classmethod
    def of(cls, segments: Sequence[Segment], least_keys: int = 1) -> Rectangle:
        """Return the rectangle of segments, with `least_keys` keys or more."""
        first = segments[0]
        uniform = len(segments) == 1 or all(one.rows == first.rows and one.keys == first.keys for one in segments)
        rows = first.rows if uniform else max(one.rows for one in segments)
        keys = first.keys if uniform else max(one.keys for one in segments)
        return cls(segments, rows, max(keys, least_keys), uniform)


@frozen
class Budget:
    """
    How large a rectangle may become, and how much padding it may compute.

    Attributes:
        keys: Most keys of a rectangle, padding included: the size of the gather buffers.
        scores: Most elements of a mask for requests of different lengths.
        slack: Padded scores that cost as much as one more kernel call.
        ragged_rows: Most rows of a request that is computed together with requests of other lengths.
        least_keys: Keys that every rectangle is padded to.
        uniform: Whether requests of one size are computed together whatever the size of a mask, as they share one.
        divisible: Whether requests of one size are planned together whatever their keys take: they are gathered in
            parts.
        block_size: Keys of a member are gathered in whole blocks of so many.
    """

    keys: int
    scores: int
    slack: int
    ragged_rows: int
    least_keys: int = 1
    uniform: bool = True
    divisible: bool = False
    block_size: int = 1

    def holds(self, members: int, keys: int) -> bool:
        """Whether so many members, with so many keys each, fit into the gather buffers."""
        blocks = -(-max(keys, self.least_keys) // self.block_size)
        return members * blocks * self.block_size <= self.keys


@frozen(eq=False)
class GroupRows:
    """
    The query rows of a group.

    Attributes:
        source: Where they are among the call's query rows: a slice, or an index of ``members * rows``.
        kept: Which of the ``members * rows`` results are not padding; None for all.
        target: The output rows of those: a slice or an index.
    """

    source: slice | Tensor
    kept: Tensor | None
    target: slice | Tensor


@frozen(eq=False)
class Group:
    """
    Requests that are computed together.

    Attributes:
        members: Requests in the group.
        rows: Query rows of each, padded.
        keys: Keys of each, padded.
        queries: Its query rows.
        source: Where its keys are.
        tiles: The kernel calls.
        per_gather: Members whose keys are gathered at once; fewer than all in uniform groups only.
    """

    members: int
    rows: int
    keys: int
    queries: GroupRows
    source: Keys
    tiles: tuple[Tile, ...]
    per_gather: int


@frozen(eq=False)
class WholeCall:
    """
    A plan of one kernel call, whose rows and keys are contiguous in the call: most dense calls.

    Attributes:
        rows: Its query rows.
        keys: Its K/V rows.
        members: The requests.
        tile: The kernel call.
    """

    rows: slice
    keys: slice
    members: int
    tile: Tile


@frozen(eq=False)
class Plan:
    """
    What all layers of a plan key compute in a step.

    Attributes:
        kernel: What computes a tile.
        groups: The groups; each row that attends to a key is in exactly one.
        empty: Row ranges ``(start, end)`` that attend to no key.
        prefix: All rows against the shared prefix of a cascade, which the other groups leave out; None without one.
        whole: The plan as a single call; None where it takes several, or the kernel has its own masks.
    """

    kernel: TileKernel
    groups: tuple[Group, ...]
    empty: tuple[tuple[int, int], ...]
    prefix: Group | None = None
    whole: WholeCall | None = field(init=False)

    @whole.default
    def _as_whole(self) -> WholeCall | None:
        kernel, groups = self.kernel, self.groups
        if kernel.make_mask is not None or self.empty or self.prefix is not None or len(groups) > 1:
            return None
        group = groups[0] if groups else None
        if group is None or len(group.tiles) > 1 or not isinstance(group.source, CallKeys):
            return None
        tile, rows, keys = group.tiles[0], group.queries.source, group.source.rows
        if tile.rows != (0, group.rows) or tile.keys != (0, group.keys):
            return None
        if not isinstance(rows, slice) or not isinstance(keys, slice) or group.per_gather < group.members:
            return None
        return WholeCall(rows, keys, group.members, tile)


def make_plan(params: PlanParams, batch: Batch, device: torch.device) -> Plan:
    """Return the plan of a checked batch, its tensors on the given device."""
    prefix = batch.common_prefix_len
    planner = _Planner(params.cascade or params if prefix else params, batch, device)
    return planner.cascade(prefix) if prefix else planner.uniform_decodes() or planner.plan()


def segments_of(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: tuple[int, int],
    *,
    causal: bool,
    chunk: int | None = None,
    first_in_spans: Mapping[int, int] | None = None,
) -> tuple[list[Segment], list[tuple[int, int]]]:
    """
    Return the segments of a batch, and the row ranges ``(start, end)`` that attend to no key.

    Rows are the end of their sequence. A row attends to no key where its request has none, or where there are more
    queries than keys and its position is before all of them. With chunks a request has a segment per chunk that its
    rows are in: each is a sequence by itself, whose last row is at the position of its last key like any other's.

    Args:
        query_lens: Query rows per request.
        seq_lens: Keys per request.
        window: Positions attended to on the left and on the right, -1 for all.
        causal: Whether no later position is attended to.
        chunk: Positions per chunk of chunked-local attention; None for no chunks.
        first_in_spans: The first position of the spans of a request's rows, by request, which a window does not hide.
    """
    left, right = window
    ahead = 0 if causal or chunk else right
    segments, empty = [], []
    start = 0
    for request, (rows, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        without_keys = 0
        if not keys:
            without_keys = rows
        elif ahead >= 0:
            without_keys = min(rows, max(0, rows - keys - ahead))
        if without_keys:
            empty.append((start, start + without_keys))
        if rows > without_keys:
            position, first_row = keys - rows + without_keys, start + without_keys
            if chunk is None:
                first_key = max(0, position - left) if left >= 0 else 0
                first_key = min(first_key, (first_in_spans or {}).get(request, first_key))
                from_call = 1 < rows == keys
                segments.append(
                    Segment(request, rows - without_keys, keys - first_key, first_row, first_key, from_call)
                )
            else:
                segments += _chunk_segments(request, (position, keys), first_row - position, left, chunk)
        start += rows
    return segments, empty


def _chunk_segments(request: int, positions: tuple[int, int], shift: int, left: int, chunk: int) -> list[Segment]:
    """Return a segment per chunk of the rows at these positions; row and position differ by `shift`."""
    segments = []
    position, end = positions
    while position < end:
        begin = position - position % chunk
        last = min(end, begin + chunk)
        first_key = max(begin, position - left) if left >= 0 else begin
        rows, keys = last - position, last - first_key
        segments.append(Segment(request, rows, keys, shift + position, first_key, from_call=1 < rows == keys))
        position = last
    return segments


def group_segments(segments: Sequence[Segment], budget: Budget) -> list[Rectangle]:
    """
    Return groups that are computed by one call each, padded to their longest member.

    A segment joins the group before it while the padding costs less than another call. Segments of one size need no
    padding. The order inside a group is that of the batch.
    """
    groups: list[list[Segment]] = []
    most_rows = most_keys = used = 0
    for segment in sorted(segments, key=lambda one: (one.from_call, one.rows, one.keys)):
        rows, keys = max(most_rows, segment.rows), max(most_keys, segment.keys)
        if groups and _fits(groups[-1], segment, rows, keys, used, budget):
            groups[-1].append(segment)
        else:
            groups.append([segment])
            rows, keys, used = segment.rows, segment.keys, 0
        used += segment.rows * segment.keys
        most_rows, most_keys = rows, keys
    return [Rectangle.of(sorted(group, key=lambda one: one.first_row), budget.least_keys) for group in groups]


def _fits(group: list[Segment], segment: Segment, rows: int, keys: int, used: int, budget: Budget) -> bool:
    """Whether a segment may join a group that then has these rows and keys, and computes `used` scores now."""
    size, last, own = len(group) + 1, group[-1], segment.rows * segment.keys
    if last.from_call != segment.from_call:
        return False
    uniform = (last.rows, last.keys) == (segment.rows, segment.keys) and used == len(group) * own
    if uniform and budget.divisible:
        return True
    if not budget.holds(size, keys):
        return False
    padded = size * rows * keys
    if uniform:
        return budget.uniform or padded <= budget.scores
    return rows <= budget.ragged_rows and padded <= budget.scores and padded - used - own <= budget.slack


class _Planner:
    """Plans one batch. Its tensors are on the given device."""

    def __init__(self, params: PlanParams, batch: Batch, device: torch.device) -> None:
        self._params = params
        self._batch = batch
        self._device = device
        self._block_table = batch.block_table
        # A batch without pages has all its keys in the call: dense calls, and profiling runs of paged layers.
        self._key_starts = cast("Tensor", batch.key_start_loc_cpu).tolist() if batch.block_table is None else None
        if batch.max_query_len == 1 and batch.num_actual_tokens == batch.num_reqs:
            self._query_lens = [1] * batch.num_reqs  # the most frequent step, without reading a tensor
        else:
            self._query_lens = cast("Tensor", batch.query_start_loc_cpu).diff().tolist()
        # Cross attention over pages has as many keys as the encoder had tokens.
        key_lens = batch.seq_lens_cpu if batch.encoder_seq_lens_cpu is None else batch.encoder_seq_lens_cpu
        self._seq_lens = cast("Tensor", key_lens).tolist()
        self._spans = Spans.of_batch(batch, self._query_lens, self._seq_lens)
        if self._spans is not None:  # each request has a separate mask
            budget = evolve(params.budget, uniform=False, divisible=False)
            self._params = evolve(params, budget=budget)

    def plan(self) -> Plan:
        """Return the plan of any batch without a shared prefix."""
        segments, empty = self._segments(self._query_lens, self._seq_lens)
        return Plan(self._params.kernel, self._groups(group_segments(segments, self._params.budget)), tuple(empty))

    def uniform_decodes(self) -> Plan | None:
        """Plan decodes that all have one length, from the first of them; return None for any other batch."""
        query_lens, seq_lens = self._query_lens, self._seq_lens
        members = len(query_lens)
        if self._spans is not None or query_lens.count(1) < members or seq_lens.count(seq_lens[0]) < members:
            return None
        segments, empty = self._segments(query_lens[:1], seq_lens[:1])
        if empty:
            return None
        first = Rectangle.of(segments)
        group = self._decodes_like(first, members, self._tiler([first]))
        return None if group is None else Plan(self._params.kernel, (group,), ())

    def cascade(self, prefix: int) -> Plan:
        """
        Plan the shared prefix as one request of all rows, and the keys after it as requests by themselves.

        The two passes are merged by LSE. That is exact: no query is positioned inside the prefix, and all attend to the
        whole of it.
        """
        segments, empty = self._segments(self._query_lens, [keys - prefix for keys in self._seq_lens])
        segments = [evolve(segment, first_key=segment.first_key + prefix) for segment in segments]
        rows = self._batch.num_actual_tokens
        # The blocks are those of the first request that has any.
        whole = Segment(segments[0].request, rows, prefix, first_row=0, first_key=0, from_call=False)
        params = self._params
        groups = self._groups(group_segments(segments, params.budget))
        of_prefix = _Planner(evolve(params, causal=False, window=(-1, -1)), self._batch, self._device)
        (shared,) = of_prefix._groups([Rectangle.of([whole], params.budget.least_keys)])
        return Plan(params.kernel, groups, tuple(empty), shared)

    def _segments(self, query_lens: list[int], seq_lens: list[int]) -> tuple[list[Segment], list[tuple[int, int]]]:
        params, spans = self._params, self._spans
        return segments_of(
            query_lens,
            seq_lens,
            params.window,
            causal=params.causal,
            chunk=params.chunk,
            first_in_spans=None if spans is None else spans.first_keys,
        )

    def _tiler(self, rectangles: list[Rectangle]) -> Tiler:
        mask, bias = self._batch.custom_mask, self._batch.attn_bias
        custom = None if mask is None else RequestCells(mask, self._query_lens, self._seq_lens)
        added = None if bias is None else RequestCells(bias, self._query_lens, self._seq_lens)
        return Tiler(self._params, rectangles, custom, added, self._device, self._spans)

    def _groups(self, rectangles: list[Rectangle]) -> tuple[Group, ...]:
        tiler = self._tiler(rectangles)
        return tuple(self._group(rectangle, tiler) for rectangle in rectangles)

    def _group(self, rectangle: Rectangle, tiler: Tiler) -> Group:
        members, rows, keys = len(rectangle.segments), rectangle.rows, rectangle.keys
        if members == rows == 1 and (alone := self._decodes_like(rectangle, 1, tiler)) is not None:
            return alone
        per_gather = self._params.members_per_gather(members, keys) if rectangle.uniform else members
        source = self._source(rectangle, per_gather)
        return Group(members, rows, keys, self._queries(rectangle), source, tiler.tiles(rectangle), per_gather)

    def _decodes_like(self, first: Rectangle, members: int, tiler: Tiler) -> Group | None:
        """Return the group of decodes that are like this first one; None if whole blocks are not gathered for it."""
        if self._block_table is None or not self._params.budget.divisible:
            return None
        (segment,) = first.segments
        per_gather = self._params.members_per_gather(members, first.keys)
        table = self._block_table[segment.request : segment.request + members]
        source = blocks_of(self._params, table, first.segments, first.keys, per_gather)
        if source is None:
            return None
        rows = slice(segment.first_row, segment.first_row + members)
        return Group(members, 1, first.keys, GroupRows(rows, None, rows), source, tiler.tiles(first), per_gather)

    def _queries(self, rectangle: Rectangle) -> GroupRows:
        segments, rows = rectangle.segments, rectangle.rows
        if all(segment.rows == rows for segment in segments):
            index = _contiguous([segment.first_row for segment in segments], rows) or index_on(
                self._device, [segment.first_row + row for segment in segments for row in range(rows)]
            )
            return GroupRows(index, None, index)
        # Padding repeats a member's last row, which attends to keys. Its results are left out.
        source = [segment.first_row + min(row, segment.rows - 1) for segment in segments for row in range(rows)]
        kept = [member * rows + row for member, segment in enumerate(segments) for row in range(segment.rows)]
        index = index_on(self._device, [*source, *kept, *(source[row] for row in kept)])
        first, second = len(source), len(source) + len(kept)
        return GroupRows(index[:first], index[first:second], index[second:])

    def _source(self, rectangle: Rectangle, per_gather: int) -> Keys:
        segments = rectangle.segments
        if self._key_starts is not None:
            return self._call_keys(rectangle, [self._key_starts[one.request] + one.first_key for one in segments])
        if segments[0].from_call and self._params.reads_call:
            return self._call_keys(rectangle, [segment.first_row for segment in segments])
        requests, table = [segment.request for segment in segments], cast("Tensor", self._block_table)
        where = _contiguous(requests, 1)
        table = table[where] if where else table.index_select(0, index_on(self._device, requests))
        blocks = blocks_of(self._params, table, segments, rectangle.keys, per_gather)
        return blocks or slots_at(
            self._params, table, self._positions(rectangle, [segment.first_key for segment in segments])
        )

    def _call_keys(self, rectangle: Rectangle, starts: list[int]) -> CallKeys:
        unpadded = all(segment.keys == rectangle.keys for segment in rectangle.segments)
        together = _contiguous(starts, rectangle.keys) if unpadded else None
        return CallKeys(together or self._positions(rectangle, starts).view(-1))

    def _positions(self, rectangle: Rectangle, starts: list[int]) -> Tensor:
        """Return ``(members, keys)`` from each start on. Padding repeats a member's last key: finite, and masked."""
        table = index_on(self._device, [*starts, *(segment.keys - 1 for segment in rectangle.segments)]).view(2, -1, 1)
        return table[0] + torch.minimum(torch.arange(rectangle.keys, device=self._device), table[1])


def _contiguous(starts: list[int], length: int) -> slice | None:
    """Return the slice that runs of one length fill without a gap, in order; None where they do not."""
    end = starts[0] + length * len(starts)
    return slice(starts[0], end) if starts == list(range(starts[0], end, length)) else None
