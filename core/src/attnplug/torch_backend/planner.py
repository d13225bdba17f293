"""Turns a batch into a plan. Lengths are read on the host; only page numbers come from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from attnplug.torch_backend.cascade import behind, prefix_shape, prefix_span
from attnplug.torch_backend.custom import CustomMask
from attnplug.torch_backend.grouping import group_spans, spans_of
from attnplug.torch_backend.pages import divide, head_rows
from attnplug.torch_backend.paging import blocks_of
from attnplug.torch_backend.plan import Given, Group, Plan, Rows, Stored
from attnplug.torch_backend.tiles import Tiler, is_even

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.torch_backend.grouping import Span
    from attnplug.torch_backend.plan import Blocks
    from attnplug.torch_backend.shape import Shape


def make_plan(shape: Shape, batch: Batch, device: torch.device) -> Plan:
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
    spans, empty = spans_of(query_lens, seq_lens, shape.window, causal=shape.causal, chunk=shape.chunk)
    groups = group_spans(spans, shape.budget)
    planner = _Planner(shape, batch, device, groups, (query_lens, seq_lens))
    return Plan(shape.kernel, tuple(planner.group(group) for group in groups), tuple(empty))


def _make_uniform(shape: Shape, batch: Batch, device: torch.device, lens: tuple[list[int], list[int]]) -> Plan | None:
    """Plan decodes that are all equally long from the first of them; None for any other batch."""
    query_lens, seq_lens = lens
    members = len(query_lens)
    if query_lens.count(1) < members or seq_lens.count(seq_lens[0]) < members:
        return None
    spans, empty = spans_of(query_lens[:1], seq_lens[:1], shape.window, causal=shape.causal, chunk=shape.chunk)
    if empty:
        return None
    group = _Planner(shape, batch, device, [spans], lens).alike(spans[0], members)
    return None if group is None else Plan(shape.kernel, (group,), ())


def _make_cascade(shape: Shape, batch: Batch, device: torch.device, lens: tuple[list[int], list[int]]) -> Plan:
    """Plan the shared prefix as one request of all rows, and what follows it as requests of their own."""
    length = batch.common_prefix_len
    spans, empty = spans_of(lens[0], [keys - length for keys in lens[1]], shape.window, causal=shape.causal)
    groups, whole = group_spans(behind(length, spans), shape.budget), prefix_span(batch, spans)
    planner = _Planner(shape, batch, device, groups, lens)
    prefix = _Planner(prefix_shape(shape), batch, device, [[whole]], lens).group([whole])
    return Plan(shape.kernel, tuple(planner.group(group) for group in groups), tuple(empty), prefix)


class _Planner:
    """Plans the groups of one batch."""

    def __init__(
        self,
        shape: Shape,
        batch: Batch,
        device: torch.device,
        groups: Sequence[list[Span]],
        lens: tuple[list[int], list[int]],
    ) -> None:
        self._shape = shape
        self._device = device
        self._block_table = batch.block_table
        # A batch without pages brings all keys with the call: dense calls, and profiling runs of paged layers.
        self._key_starts = cast("Tensor", batch.key_start_loc_cpu).tolist() if batch.block_table is None else None
        custom = None if batch.custom_mask is None else CustomMask(batch.custom_mask, *lens, self._index)
        self._tiler = Tiler(shape, groups, custom, self._index, device)

    def group(self, group: list[Span]) -> Group:
        """Return the plan of one group."""
        alone = self.alike(group[0], 1) if len(group) == 1 and group[0].rows == 1 else None
        if alone is not None:
            return alone
        rows, keys = max(span.rows for span in group), max(span.keys for span in group)
        keys, even = max(keys, self._shape.kernel.least_keys), is_even(group)
        at_once = self._shape.members_at_once(len(group), keys) if even else len(group)
        return Group(
            members=len(group),
            rows=rows,
            keys=keys,
            queries=self._queries(group, rows),
            source=self._source(group, keys, at_once),
            tiles=tuple(self._tiler.tiles(group, rows, keys)),
            at_once=at_once,
        )

    def alike(self, span: Span, members: int) -> Group | None:
        """Return the plan of requests of one row that are like this first one, if they are gathered in whole blocks."""
        if self._block_table is None or not self._shape.budget.divisible:
            return None
        at_once = self._shape.members_at_once(members, span.keys)
        table = self._block_table[span.request : span.request + members]
        source = blocks_of(self._shape, table, [span], (span.keys, at_once), self._index)
        if source is None:
            return None
        rows, tiles = slice(span.first_row, span.first_row + members), self._tiler.tiles([span], 1, span.keys)
        return Group(members, 1, span.keys, Rows(rows, None, rows), source, tuple(tiles), at_once)

    # -- query rows --------------------------------------------------------------------------------------------------

    def _queries(self, group: list[Span], rows: int) -> Rows:
        if all(span.rows == rows for span in group):
            together = _together([span.first_row for span in group], rows)
            index = together or self._index([span.first_row + row for span in group for row in range(rows)])
            return Rows(index, None, index)
        # Rows beyond a member's own repeat its last one: they see keys, and their results are left out.
        taken = [span.first_row + min(row, span.rows - 1) for span in group for row in range(rows)]
        kept = [member * rows + row for member, span in enumerate(group) for row in range(span.rows)]
        index = self._index([*taken, *kept, *(taken[row] for row in kept)])
        first, second = len(taken), len(taken) + len(kept)
        return Rows(index[:first], index[first:second], index[second:])

    # -- keys --------------------------------------------------------------------------------------------------------

    def _source(self, group: list[Span], keys: int, at_once: int) -> Given | Stored | Blocks:
        if self._key_starts is not None:
            return self._given(group, keys, [self._key_starts[span.request] + span.first_key for span in group])
        if group[0].fresh and self._shape.reads_call:
            return self._given(group, keys, [span.first_row for span in group])
        return self._stored(group, keys, at_once)

    def _given(self, group: list[Span], keys: int, starts: list[int]) -> Given:
        even = all(span.keys == keys for span in group)
        together = _together(starts, keys) if even else None
        return Given(together or self._positions(group, keys, starts).view(-1))

    def _positions(self, group: list[Span], keys: int, starts: list[int]) -> Tensor:
        """``(members, keys)`` from each start on. A member's last key is repeated as padding: finite, and masked."""
        table = self._index([*starts, *(span.keys - 1 for span in group)]).view(2, -1, 1)
        return table[0] + torch.minimum(torch.arange(keys, device=self._device), table[1])

    def _stored(self, group: list[Span], keys: int, at_once: int) -> Stored | Blocks:
        where = _together([span.request for span in group], 1)
        table = cast("Tensor", self._block_table)
        table = table[where] if where else table.index_select(0, self._index([span.request for span in group]))
        return blocks_of(self._shape, table, group, (keys, at_once), self._index) or self._slots(table, group, keys)

    def _slots(self, table: Tensor, group: list[Span], keys: int) -> Stored:
        """A number per key: where the members' first keys lie at different places of their blocks, or few keys do."""
        size = cast("int", self._shape.block_size)
        positions = self._positions(group, keys, [span.first_key for span in group])
        columns, offsets = divide(positions, size)
        blocks, steps, rows = table.long().gather(1, columns), self._shape.row_steps, None
        if steps is not None:
            rows = head_rows(blocks * steps[0] + offsets * steps[1], self._shape.num_kv_heads, steps[2])
        return Stored((blocks * size + offsets).view(-1), rows, steps or (0, 0, 0))

    def _index(self, values: list[int]) -> Tensor:
        index = torch.tensor(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return index
        # From pinned memory the copy is ordered with the stream, and the host goes on.
        return index.pin_memory().to(self._device, non_blocking=True)


def _together(starts: list[int], length: int) -> slice | None:
    """Return the slice that runs of one length fill without a gap, in order; None where they do not."""
    end = starts[0] + length * len(starts)
    return slice(starts[0], end) if starts == list(range(starts[0], end, length)) else None
