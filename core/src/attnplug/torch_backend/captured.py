"""The plan of a captured shape: tensors that stay where a replay reads them, and that each build writes a step into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from attnplug.torch_backend.masks import AlibiMask, Tile, additive, ragged_distances, ragged_visibility
from attnplug.torch_backend.plan import Group, Plan, Rows
from attnplug.torch_backend.sources import SlotKeys, divide, head_rows, padded_keys

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.inputs.batch import Batch
    from attnplug.torch_backend.builder import PlanParams


class CapturedPlan:
    """
    Every request has the shape's query length, and as many keys as the longest sequence may have: those beyond a
    request's own are its last key again, and masked. Lengths and pages are read on the device alone.

    A row of a padded request attends nothing: it is computed over all keys, and its result is thrown away.

    Args:
        shape: What planning knows of the layers.
        slot: The captured shape.
        device: Where the tensors live.
    """

    def __init__(self, shape: PlanParams, graph: GraphBuffers, device: torch.device) -> None:
        keys = padded_keys(graph.max_seq_len)
        most = max(1, shape.budget.keys // keys)
        self._parts = tuple(
            _Part(shape, first, min(graph.key.num_reqs, first + most), cast("int", graph.key.query_len), keys, device)
            for first in range(0, graph.key.num_reqs, most)
        )
        self._plan = Plan(shape.kernel, tuple(part.group for part in self._parts), ())

    def write(self, batch: Batch) -> Plan:
        """Return the plan, after this step's lengths and pages are written into it."""
        lens = batch.seq_lens if batch.encoder_seq_lens is None else batch.encoder_seq_lens
        for part in self._parts:
            part.write(lens, cast("Tensor", batch.block_table))
        return self._plan


class _Part:
    """The requests from `first` to `last`, which are one group."""

    def __init__(self, shape: PlanParams, first: int, last: int, rows: int, keys: int, device: torch.device) -> None:
        self._shape = shape
        self._range = slice(first, last)
        members, heads = last - first, shape.num_kv_heads

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._slots = zeros(members * keys, dtype=torch.int64)
        self._rows = None if shape.row_steps is None else zeros(members * heads * keys, dtype=torch.int64)
        self._mask = zeros(members, 1, rows * shape.ratio, keys, dtype=shape.mask_dtype)
        self._blind = zeros(members, rows, dtype=torch.bool)
        self._far = zeros(members, rows, keys, dtype=torch.float32) if shape.alibi else None
        place = slice(first * rows, last * rows)
        self.group = Group(
            members=members,
            rows=rows,
            keys=keys,
            queries=Rows(place, None, place),
            source=SlotKeys(self._slots, self._rows, shape.row_steps or (0, 0, 0)),
            tiles=tuple(self._tiles(members, rows, keys)),
        )

    def _tiles(self, members: int, rows: int, keys: int) -> list[Tile]:
        step, ratio = self._shape.rows_per_tile(members, keys), self._shape.ratio
        tiles = []
        for start in range(0, rows, step):
            end = min(rows, start + step)
            mask: Any = self._mask[:, :, start * ratio : end * ratio]
            mask = mask if self._far is None else AlibiMask(mask, self._far[:, start:end])
            tiles.append(Tile((start, end), (0, keys), mask, fully_masked=self._blind[:, start:end]))
        return tiles

    def write(self, lens: Tensor, block_table: Tensor) -> None:
        """Write slots, mask and distances, given ``(num_reqs,)`` keys and ``(num_reqs, columns)`` blocks of a batch."""
        lens = lens[self._range].long()
        self._write_slots(lens, block_table[self._range].long())
        shape, group = self._shape, self.group
        num_rows = torch.full_like(lens, group.rows)
        seen = ragged_visibility(shape.visibility, num_rows, lens, group.rows, group.keys)
        if shape.chunk is not None:
            seen &= self._same_chunk(lens, shape.chunk)
        torch.logical_not(seen.any(-1), out=self._blind)
        seen |= self._blind.unsqueeze(2)
        self._mask.copy_(additive(seen.repeat_interleave(shape.ratio, 1), self._mask.dtype).unsqueeze(1))
        if self._far is not None:
            self._far.copy_(ragged_distances(num_rows, lens, group.rows, group.keys, shape.alibi))

    def _write_slots(self, lens: Tensor, table: Tensor) -> None:
        size = cast("int", self._shape.block_size)
        last = (lens - 1).clamp_(min=0).unsqueeze(1)
        positions = torch.minimum(torch.arange(self.group.keys, device=lens.device), last)
        # Blocks before all that is seen may be gone: the host may have given them to other requests.
        positions = torch.maximum(positions, self._first_seen(lens))
        columns, offsets = divide(positions, size)
        # A request without keys has no block that could be read, not even in its first column.
        blocks, steps = table.gather(1, columns) * (lens > 0).unsqueeze(1), self._shape.row_steps
        torch.add(blocks * size, offsets, out=self._slots.view(blocks.shape))
        if self._rows is not None and steps is not None:
            first_heads = blocks * steps[0] + offsets * steps[1]
            self._rows.copy_(head_rows(first_heads, self._shape.num_kv_heads, steps[2]))

    def _first_seen(self, lens: Tensor) -> Tensor:
        """``(members, 1)``: the first position that a row of each member may see."""
        first_row, visibility, chunk = lens - self.group.rows, self._shape.visibility, self._shape.chunk
        first = first_row - visibility.left if visibility.left >= 0 else torch.zeros_like(lens)
        if chunk is not None:
            first = torch.maximum(first, first_row - first_row % chunk)
        return first.clamp_(min=0).unsqueeze(1)

    def _same_chunk(self, lens: Tensor, chunk: int) -> Tensor:
        """``(members, rows, keys)``: whether a row and a key are in one chunk of chunked-local attention."""
        rows = torch.arange(self.group.rows, device=lens.device)
        chunks = torch.div(lens.unsqueeze(1) - self.group.rows + rows, chunk, rounding_mode="floor")
        keys = torch.div(torch.arange(self.group.keys, device=lens.device), chunk, rounding_mode="floor")
        return chunks.unsqueeze(2) == keys
