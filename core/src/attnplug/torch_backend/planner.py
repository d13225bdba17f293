"""Turns a batch into a plan. Lengths are read on the host; only page numbers come from the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from attnplug.torch_backend.grouping import group_spans, spans_of
from attnplug.torch_backend.masks import Template, ragged_mask
from attnplug.torch_backend.plan import Given, Group, Plan, Rows, Stored, Tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.batch import Batch
    from attnplug.torch_backend.grouping import Span
    from attnplug.torch_backend.shape import Shape


def make_plan(shape: Shape, batch: Batch, device: torch.device) -> Plan:
    """Return the plan of a batch that was checked, its tensors on the given device."""
    query_lens = cast("Tensor", batch.query_start_loc_cpu).diff().tolist()
    seq_lens = cast("Tensor", batch.seq_lens_cpu).tolist()
    spans, empty = spans_of(query_lens, seq_lens, shape.window, causal=shape.causal)
    groups = group_spans(spans, shape.budget)
    planner = _Planner(shape, batch, device, groups)
    return Plan(shape.kernel, tuple(planner.group(group) for group in groups), tuple(empty))


class _Planner:
    """Plans the groups of one batch."""

    def __init__(self, shape: Shape, batch: Batch, device: torch.device, groups: Sequence[list[Span]]) -> None:
        self._shape = shape
        self._device = device
        self._block_table = batch.block_table
        # A batch without pages brings all keys with the call: dense calls, and profiling runs of paged layers.
        self._key_starts = cast("Tensor", batch.key_start_loc_cpu).tolist() if batch.block_table is None else None
        even = [] if shape.kernel.make_mask else [group for group in groups if _is_even(group)]
        self._template = self._make_template(even)

    def group(self, group: list[Span]) -> Group:
        """Return the plan of one group."""
        rows, keys = max(span.rows for span in group), max(span.keys for span in group)
        keys = max(keys, self._shape.kernel.least_keys)
        return Group(
            members=len(group),
            rows=rows,
            keys=keys,
            queries=self._queries(group, rows),
            source=self._source(group, keys),
            tiles=tuple(self._tiles(group, rows, keys)),
        )

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

    def _source(self, group: list[Span], keys: int) -> Given | Stored:
        if self._key_starts is not None:
            return self._given(group, keys, [self._key_starts[span.request] + span.first_key for span in group])
        if group[0].fresh:
            return self._given(group, keys, [span.first_row for span in group])
        return self._stored(group, keys)

    def _given(self, group: list[Span], keys: int, starts: list[int]) -> Given:
        even = all(span.keys == keys for span in group)
        together = _together(starts, keys) if even else None
        return Given(together or self._positions(group, keys, starts).view(-1))

    def _positions(self, group: list[Span], keys: int, starts: list[int]) -> Tensor:
        """``(members, keys)`` from each start on. A member's last key is repeated as padding: finite, and masked."""
        table = self._index([*starts, *(span.keys - 1 for span in group)]).view(2, -1, 1)
        return table[0] + torch.minimum(torch.arange(keys, device=self._device), table[1])

    def _stored(self, group: list[Span], keys: int) -> Stored:
        size, table = cast("int", self._shape.block_size), cast("Tensor", self._block_table)
        positions = self._positions(group, keys, [span.first_key for span in group])
        where = _together([span.request for span in group], 1)
        table = table[where] if where else table.index_select(0, self._index([span.request for span in group]))
        columns, offsets = _divide(positions, size)
        blocks, steps = table.long().gather(1, columns), self._shape.row_steps
        rows = None if steps is None else self._head_rows(blocks * steps[0] + offsets * steps[1], steps[2])
        return Stored((blocks * size + offsets).view(-1), rows, steps or (0, 0, 0))

    def _head_rows(self, first_heads: Tensor, step: int) -> Tensor:
        """``(members * heads * keys,)`` from the rows ``(members, keys)`` of head 0."""
        heads = torch.arange(self._shape.num_kv_heads, device=self._device) * step
        return (first_heads.unsqueeze(1) + heads.view(-1, 1)).view(-1)

    # -- tiles -------------------------------------------------------------------------------------------------------

    def _tiles(self, group: list[Span], rows: int, keys: int) -> list[Tile]:
        make_mask = self._shape.kernel.make_mask
        if make_mask is not None:
            mask = make_mask(self._shape.sight, self._lens(group), rows, keys, self._shape.ratio)
            return [Tile((0, rows), (0, keys), mask)]
        if _is_even(group):
            return self._even_tiles(len(group), rows, keys)
        return self._ragged_tiles(group, rows, keys)

    def _lens(self, group: list[Span]) -> Tensor:
        return self._index([*(span.rows for span in group), *(span.keys for span in group)]).view(2, -1)

    def _ragged_tiles(self, group: list[Span], rows: int, keys: int) -> list[Tile]:
        shape, lens = self._shape, self._lens(group)
        mask = ragged_mask(shape.sight, lens[0], lens[1], rows, keys, repeat=shape.ratio, dtype=shape.mask_dtype)
        return [
            Tile((start, end), (0, keys), mask[:, :, start * shape.ratio : end * shape.ratio])
            for start, end in self._cuts(len(group), rows, keys)
        ]

    def _even_tiles(self, members: int, rows: int, keys: int) -> list[Tile]:
        if self._is_square(rows, keys):
            return [Tile((0, rows), (0, keys), causal=True)]
        return [self._even_tile(cut, rows, keys) for cut in self._cuts(members, rows, keys)]

    def _even_tile(self, cut: tuple[int, int], rows: int, keys: int) -> Tile:
        low, high = self._reach(cut, rows, keys)
        start, end = cut
        if self._template is None or end - start == 1 or not self._shape.sight.binds(rows, keys):
            return Tile(cut, (low, high))
        first = start + keys - rows
        return Tile(cut, (low, high), self._template.tile(end - start, low - first, high - first))

    def _is_square(self, rows: int, keys: int) -> bool:
        sight = self._shape.sight
        return self._shape.kernel.fused and 1 < rows == keys and sight.right == 0 and not 0 <= sight.left < keys - 1

    def _cuts(self, members: int, rows: int, keys: int) -> list[tuple[int, int]]:
        step = self._shape.rows_per_tile(members, keys)
        return [(start, min(rows, start + step)) for start in range(0, rows, step)]

    def _reach(self, cut: tuple[int, int], rows: int, keys: int) -> tuple[int, int]:
        """Return the keys ``(first, last + 1)`` that the rows of an even tile see."""
        sight, shift = self._shape.sight, keys - rows
        low = max(0, cut[0] + shift - sight.left) if sight.left >= 0 else 0
        high = min(keys, cut[1] + shift + sight.right) if sight.right >= 0 else keys
        return low, high

    def _make_template(self, groups: list[list[Span]]) -> Template | None:
        """Return a mask that every tile of every even group finds its own in, or None where none needs one."""
        distances, most_rows, shape = [0], 1, self._shape
        for group in groups:
            rows, keys = group[0].rows, group[0].keys
            if shape.sight.binds(rows, keys) and not self._is_square(rows, keys):
                for cut in self._cuts(len(group), rows, keys):
                    first = cut[0] + keys - rows
                    distances += [reach - first for reach in self._reach(cut, rows, keys)]
                    most_rows = max(most_rows, cut[1] - cut[0])
        if most_rows == 1:
            return None
        distance = (min(distances), max(distances))
        return Template(
            shape.sight, most_rows, distance, repeat=shape.ratio, dtype=shape.mask_dtype, device=self._device
        )

    def _index(self, values: list[int]) -> Tensor:
        index = torch.tensor(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return index
        # From pinned memory the copy is ordered with the stream, and the host goes on.
        return index.pin_memory().to(self._device, non_blocking=True)


def _divide(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return quotients and remainders. Integer division is most of a build, and block sizes are powers of two."""
    shift = size.bit_length() - 1
    if size == 1 << shift:
        return positions >> shift, positions & (size - 1)
    return torch.div(positions, size, rounding_mode="floor"), positions % size


def _is_even(group: list[Span]) -> bool:
    return all(span.rows == group[0].rows and span.keys == group[0].keys for span in group)


def _together(starts: list[int], length: int) -> slice | None:
    """Return the slice that runs of one length fill without a gap, in order; None where they do not."""
    end = starts[0] + length * len(starts)
    return slice(starts[0], end) if starts == list(range(starts[0], end, length)) else None
