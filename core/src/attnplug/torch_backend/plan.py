"""Turns a batch into a plan: which rows meet which keys, in which kernel calls, for all layers of a plan key."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from attrs import evolve, frozen

from attnplug.torch_backend.masks import CustomMask, Tile, Tiler, is_uniform
from attnplug.torch_backend.sources import BlockKeys, CallKeys, SlotKeys, blocks_of, divide, head_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.torch_backend.builder import PlanParams
    from attnplug.torch_backend.sdpa import Kernel


@frozen(eq=False)
class Rows:
    """
    The query rows of a group.

    Attributes:
        taken: Where they are among the call's query rows: a slice, or an index of ``members * rows``.
        kept: Which of the ``members * rows`` results are no padding; None for all.
        put: Where those go among the output rows: a slice or an index.
    """

    taken: slice | Tensor
    kept: Tensor | None
    put: slice | Tensor


@frozen(eq=False)
class Group:
    """
    Requests that are computed together, as a rectangle.

    Attributes:
        members: Requests in the group.
        rows: Query rows of each, padded.
        keys: Keys of each, padded.
        queries: Where its query rows are.
        source: Where its keys are.
        tiles: The kernel calls.
        at_once: Members that are gathered at once, of a group whose members are equal; None for all.
    """

    members: int
    rows: int
    keys: int
    queries: Rows
    source: CallKeys | SlotKeys | BlockKeys
    tiles: tuple[Tile, ...]
    per_gather: int | None = None


@frozen(eq=False)
class Plan:
    """
    A batch, planned.

    Attributes:
        kernel: What attends each tile.
        groups: The rectangles; each row that attends something is in exactly one.
        empty: Row ranges ``(start, end)`` that attend nothing.
        prefix: All rows against the keys that all requests share, which the other groups leave out; None for none.
    """

    kernel: Kernel
    groups: tuple[Group, ...]
    empty: tuple[tuple[int, int], ...]
    prefix: Group | None = None


@frozen
class Segment:
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
    from_call: bool


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


def segments_of(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: tuple[int, int],
    *,
    causal: bool,
    chunk: int | None = None,
) -> tuple[list[Segment], list[tuple[int, int]]]:
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
    segments, empty = [], []
    start = 0
    for request, (rows, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        fully_masked = 0
        if not keys:
            fully_masked = rows
        elif reach >= 0:
            fully_masked = min(rows, max(0, rows - keys - reach))
        if fully_masked:
            empty.append((start, start + fully_masked))
        if rows > fully_masked:
            position = keys - rows + fully_masked
            first_key = max(0, position - left) if left >= 0 else 0
            if chunk is None:
                from_call = 1 < rows == keys
                segments.append(
                    Segment(request, rows - fully_masked, keys - first_key, start + fully_masked, first_key, from_call)
                )
            else:
                segments += _chunk_segments(request, (position, keys), start + fully_masked - position, left, chunk)
        start += rows
    return segments, empty


def _chunk_segments(request: int, positions: tuple[int, int], shift: int, left: int, chunk: int) -> list[Segment]:
    """Return a span per chunk that rows at these positions touch; row and position differ by `shift`."""
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


def group_segments(segments: Sequence[Segment], budget: Budget) -> list[list[Segment]]:
    """
    Return groups that are computed by one call each, padded to their longest member.

    A span joins the group before it while what it pads costs less than a call of its own would. Spans of the same size
    pad nothing. The order inside a group is that of the batch.
    """
    groups: list[list[Segment]] = []
    most_rows = most_keys = used = 0
    for segment in sorted(segments, key=lambda s: (s.from_call, s.rows, s.keys)):
        rows, keys = max(most_rows, segment.rows), max(most_keys, segment.keys)
        if groups and _fits(groups[-1], segment, rows, keys, used, budget):
            groups[-1].append(segment)
        else:
            groups.append([segment])
            rows, keys, used = segment.rows, segment.keys, 0
        used += segment.rows * segment.keys
        most_rows, most_keys = rows, keys
    return [sorted(group, key=lambda s: s.first_row) for group in groups]


def _fits(group: list[Segment], segment: Segment, rows: int, keys: int, used: int, budget: Budget) -> bool:
    size = len(group) + 1
    last = group[-1]
    if last.from_call != segment.from_call:
        return False
    even = (last.rows, last.keys) == (segment.rows, segment.keys) and used == len(group) * segment.rows * segment.keys
    if even and budget.divisible:
        return True
    if size * max(keys, budget.least_keys) > budget.keys:
        return False
    if even:
        return budget.even or size * rows * keys <= budget.scores
    padded = size * rows * keys
    wasted = padded - used - segment.rows * segment.keys
    return rows <= budget.ragged_rows and padded <= budget.scores and wasted <= budget.slack


def make_plan(shape: PlanParams, batch: Batch, device: torch.device) -> Plan:
    """Return the plan of a batch that was checked, its tensors on the given device."""
    if batch.max_query_len == 1 and batch.num_actual_tokens == batch.num_reqs:
        query_lens = [1] * batch.num_reqs  # the usual step, and known without a tensor
    else:
        query_lens = cast("Tensor", batch.query_start_loc_cpu).diff().tolist()
    # Cross attention over pages has as many keys as the encoder had tokens.
    key_lens = batch.seq_lens_cpu if batch.encoder_seq_lens_cpu is None else batch.encoder_seq_lens_cpu
    seq_lens = cast("Tensor", key_lens).tolist()
    if batch.common_prefix_len:
        return _make_cascade(shape.cascade or shape, batch, device, (query_lens, seq_lens))
    alike = _make_uniform(shape, batch, device, (query_lens, seq_lens))
    if alike is not None:
        return alike
    segments, empty = segments_of(query_lens, seq_lens, shape.window, causal=shape.causal, chunk=shape.chunk)
    groups = group_segments(segments, shape.budget)
    planner = _Planner(shape, batch, device, groups, (query_lens, seq_lens))
    return Plan(shape.kernel, tuple(planner.group(group) for group in groups), tuple(empty))


def _make_uniform(
    shape: PlanParams, batch: Batch, device: torch.device, lens: tuple[list[int], list[int]]
) -> Plan | None:
    """Plan decodes that are all equally long from the first of them; None for any other batch."""
    query_lens, seq_lens = lens
    members = len(query_lens)
    if query_lens.count(1) < members or seq_lens.count(seq_lens[0]) < members:
        return None
    segments, empty = segments_of(query_lens[:1], seq_lens[:1], shape.window, causal=shape.causal, chunk=shape.chunk)
    if empty:
        return None
    group = _Planner(shape, batch, device, [segments], lens).alike(segments[0], members)
    return None if group is None else Plan(shape.kernel, (group,), ())


def _make_cascade(shape: PlanParams, batch: Batch, device: torch.device, lens: tuple[list[int], list[int]]) -> Plan:
    """Plan the shared prefix as one request of all rows, and what follows it as requests of their own."""
    length = batch.common_prefix_len
    segments, empty = segments_of(lens[0], [keys - length for keys in lens[1]], shape.window, causal=shape.causal)
    groups, whole = group_segments(behind(length, segments), shape.budget), prefix_span(batch, segments)
    planner = _Planner(shape, batch, device, groups, lens)
    prefix = _Planner(prefix_shape(shape), batch, device, [[whole]], lens).group([whole])
    return Plan(shape.kernel, tuple(planner.group(group) for group in groups), tuple(empty), prefix)


class _Planner:
    """Plans the groups of one batch."""

    def __init__(
        self,
        shape: PlanParams,
        batch: Batch,
        device: torch.device,
        groups: Sequence[list[Segment]],
        lens: tuple[list[int], list[int]],
    ) -> None:
        self._shape = shape
        self._device = device
        self._block_table = batch.block_table
        # A batch without pages brings all keys with the call: dense calls, and profiling runs of paged layers.
        self._key_starts = cast("Tensor", batch.key_start_loc_cpu).tolist() if batch.block_table is None else None
        custom = None if batch.custom_mask is None else CustomMask(batch.custom_mask, *lens, self._index)
        self._tiler = Tiler(shape, groups, custom, self._index, device)

    def group(self, group: list[Segment]) -> Group:
        """Return the plan of one group."""
        alone = self.alike(group[0], 1) if len(group) == 1 and group[0].rows == 1 else None
        if alone is not None:
            return alone
        rows, keys = max(segment.rows for segment in group), max(segment.keys for segment in group)
        keys, even = max(keys, self._shape.kernel.least_keys), is_uniform(group)
        per_gather = self._shape.members_per_gather(len(group), keys) if even else len(group)
        return Group(
            members=len(group),
            rows=rows,
            keys=keys,
            queries=self._queries(group, rows),
            source=self._source(group, keys, per_gather),
            tiles=tuple(self._tiler.tiles(group, rows, keys)),
            per_gather=per_gather,
        )

    def alike(self, segment: Segment, members: int) -> Group | None:
        """Return the plan of requests of one row that are like this first one, if they are gathered in whole blocks."""
        if self._block_table is None or not self._shape.budget.divisible:
            return None
        per_gather = self._shape.members_per_gather(members, segment.keys)
        table = self._block_table[segment.request : segment.request + members]
        source = blocks_of(self._shape, table, [segment], (segment.keys, per_gather), self._index)
        if source is None:
            return None
        rows, tiles = (
            slice(segment.first_row, segment.first_row + members),
            self._tiler.tiles([segment], 1, segment.keys),
        )
        return Group(members, 1, segment.keys, Rows(rows, None, rows), source, tuple(tiles), per_gather)

    # -- query rows --------------------------------------------------------------------------------------------------

    def _queries(self, group: list[Segment], rows: int) -> Rows:
        if all(segment.rows == rows for segment in group):
            together = _contiguous([segment.first_row for segment in group], rows)
            index = together or self._index([segment.first_row + row for segment in group for row in range(rows)])
            return Rows(index, None, index)
        # Rows beyond a member's own repeat its last one: they see keys, and their results are left out.
        taken = [segment.first_row + min(row, segment.rows - 1) for segment in group for row in range(rows)]
        kept = [member * rows + row for member, segment in enumerate(group) for row in range(segment.rows)]
        index = self._index([*taken, *kept, *(taken[row] for row in kept)])
        first, second = len(taken), len(taken) + len(kept)
        return Rows(index[:first], index[first:second], index[second:])

    # -- keys --------------------------------------------------------------------------------------------------------

    def _source(self, group: list[Segment], keys: int, per_gather: int) -> CallKeys | SlotKeys | BlockKeys:
        if self._key_starts is not None:
            return self._given(
                group, keys, [self._key_starts[segment.request] + segment.first_key for segment in group]
            )
        if group[0].from_call and self._shape.reads_call:
            return self._given(group, keys, [segment.first_row for segment in group])
        return self._stored(group, keys, per_gather)

    def _given(self, group: list[Segment], keys: int, starts: list[int]) -> CallKeys:
        even = all(segment.keys == keys for segment in group)
        together = _contiguous(starts, keys) if even else None
        return CallKeys(together or self._positions(group, keys, starts).view(-1))

    def _positions(self, group: list[Segment], keys: int, starts: list[int]) -> Tensor:
        """``(members, keys)`` from each start on. A member's last key is repeated as padding: finite, and masked."""
        table = self._index([*starts, *(segment.keys - 1 for segment in group)]).view(2, -1, 1)
        return table[0] + torch.minimum(torch.arange(keys, device=self._device), table[1])

    def _stored(self, group: list[Segment], keys: int, per_gather: int) -> SlotKeys | BlockKeys:
        where = _contiguous([segment.request for segment in group], 1)
        table = cast("Tensor", self._block_table)
        table = table[where] if where else table.index_select(0, self._index([segment.request for segment in group]))
        return blocks_of(self._shape, table, group, (keys, per_gather), self._index) or self._slots(table, group, keys)

    def _slots(self, table: Tensor, group: list[Segment], keys: int) -> SlotKeys:
        """A number per key: where the members' first keys lie at different places of their blocks, or few keys do."""
        size = cast("int", self._shape.block_size)
        positions = self._positions(group, keys, [segment.first_key for segment in group])
        columns, offsets = divide(positions, size)
        blocks, steps, rows = table.long().gather(1, columns), self._shape.row_steps, None
        if steps is not None:
            rows = head_rows(blocks * steps[0] + offsets * steps[1], self._shape.num_kv_heads, steps[2])
        return SlotKeys((blocks * size + offsets).view(-1), rows, steps or (0, 0, 0))

    def _index(self, values: list[int]) -> Tensor:
        index = torch.tensor(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return index
        # From pinned memory the copy is ordered with the stream, and the host goes on.
        return index.pin_memory().to(self._device, non_blocking=True)


def _contiguous(starts: list[int], length: int) -> slice | None:
    """Return the slice that runs of one length fill without a gap, in order; None where they do not."""
    end = starts[0] + length * len(starts)
    return slice(starts[0], end) if starts == list(range(starts[0], end, length)) else None


def prefix_span(batch: Batch, segments: Sequence[Segment]) -> Segment:
    """Return the prefix as one request of all query rows, in the blocks of the first request that has any."""
    rows, keys = batch.num_actual_tokens, batch.common_prefix_len
    return Segment(segments[0].request, rows, keys, first_row=0, first_key=0, from_call=False)


def prefix_shape(shape: PlanParams) -> PlanParams:
    """Return what planning has to know of the prefix: every row sees every key."""
    return evolve(shape, causal=False, window=(-1, -1))


def behind(prefix: int, segments: Sequence[Segment]) -> list[Segment]:
    """Return spans that were found without the prefix, where they stand in their requests."""
    return [evolve(segment, first_key=segment.first_key + prefix) for segment in segments]
