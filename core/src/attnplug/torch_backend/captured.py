"""The plan of a captured graph: tensors that stay where a replay reads them, and that each build writes a step into."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from attnplug.torch_backend.masks import additive_mask, alibi_distance, in_spans, masked_tiles, relative_positions
from attnplug.torch_backend.plan import Group, GroupRows, Plan
from attnplug.torch_backend.sources import SlotKeys, divide, head_rows, padded_keys

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.inputs.batch import Batch
    from attnplug.torch_backend.builder import PlanParams


class CapturedPlan:
    """
    The plan of one graph shape.

    Every request has the shape's query length, and as many keys as the longest sequence may have: those beyond a
    request's own repeat its last key, and are masked. Lengths and pages are read on the device only. A row of a padded
    request attends to no key: it is computed over all keys, and its result is replaced.

    Args:
        params: The layers' parameters.
        graph: The graph buffers.
        device: Where the tensors are made.

    Attributes:
        plan: The plan: the same object for all replays.
    """

    def __init__(self, params: PlanParams, graph: GraphBuffers, device: torch.device) -> None:
        keys, num_reqs = padded_keys(graph.max_seq_len), graph.key.num_reqs
        most = max(1, params.budget.keys // keys)
        self._groups = tuple(
            _CapturedGroup(params, first, min(num_reqs, first + most), cast("int", graph.key.query_len), keys, device)
            for first in range(0, num_reqs, most)
        )
        self.plan = Plan(params.kernel, tuple(one.group for one in self._groups), ())

    def write(self, batch: Batch) -> None:
        """Write a step's lengths, pages and mask, all from device tensors: a graph may record it."""
        lens = batch.seq_lens if batch.encoder_seq_lens is None else batch.encoder_seq_lens
        for one in self._groups:
            one.write(lens, cast("Tensor", batch.block_table), batch.custom_mask, batch.mm_prefix_range)


class _CapturedGroup:
    """The requests from `first` to `last`."""

    def __init__(self, params: PlanParams, first: int, last: int, rows: int, keys: int, device: torch.device) -> None:
        self._params = params
        self._requests = slice(first, last)
        members = last - first

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._slots = zeros(members * keys, dtype=torch.int64)
        by_head = params.row_strides is not None
        self._rows = zeros(members * params.num_kv_heads * keys, dtype=torch.int64) if by_head else None
        self._mask = zeros(members, 1, rows * params.ratio, keys, dtype=params.mask_dtype)
        self._fully_masked = zeros(members, rows, dtype=torch.bool)
        self._distance = zeros(members, rows, keys, dtype=torch.float32) if params.alibi else None
        query_rows = slice(first * rows, last * rows)
        self.group = Group(
            members,
            rows,
            keys,
            GroupRows(query_rows, None, query_rows),
            SlotKeys(self._slots, self._rows, params.row_strides or (0, 0, 0)),
            masked_tiles(params, self._mask, self._distance, self._fully_masked),
            members,
        )

    def write(
        self, lens: Tensor, block_table: Tensor, custom_mask: Tensor | None, ranges: Tensor | None = None
    ) -> None:
        """
        Write slots, mask and distances of a step.

        Args:
            lens: ``(num_reqs,)`` keys per request.
            block_table: ``(num_reqs, columns)``.
            custom_mask: ``(num_reqs, query_len, max_seq_len)`` bool, or None.
            ranges: ``(num_reqs * query_len, 2)``, as of `Batch.mm_prefix_range`, or None.
        """
        lens = lens[self._requests].long()
        params, group = self._params, self.group
        first = self._first_visible(lens)
        if ranges is not None:
            ranges = ranges.view(-1, group.rows, 2)[self._requests].long()
            positions = (lens - group.rows).unsqueeze(1) + torch.arange(group.rows, device=lens.device)
            shown = in_spans(ranges, positions, torch.arange(group.keys, device=lens.device).view(1, 1, -1))
            starts = torch.where(shown.any(-1), ranges[..., 0], positions).amin(1, keepdim=True)
            first = torch.minimum(first, starts.clamp_(min=0))
        self._write_slots(lens, block_table[self._requests].long(), first)
        relative = relative_positions(torch.full_like(lens, group.rows), lens, group.rows, group.keys)
        visible = params.visibility.in_group(relative, lens)
        if params.chunk is not None:
            visible &= self._same_chunk(lens, params.chunk)
        if ranges is not None:
            visible |= shown & (torch.arange(group.keys, device=lens.device) < lens.unsqueeze(1)).unsqueeze(1)
        if custom_mask is not None:  # keys beyond the longest sequence are hidden already
            visible[..., : custom_mask.shape[-1]] &= custom_mask[self._requests]
        torch.logical_not(visible.any(-1), out=self._fully_masked)
        visible |= self._fully_masked.unsqueeze(2)
        self._mask.copy_(additive_mask(visible.repeat_interleave(params.ratio, 1), self._mask.dtype).unsqueeze(1))
        if self._distance is not None:
            self._distance.copy_(alibi_distance(relative, params.alibi))

    def _write_slots(self, lens: Tensor, table: Tensor, first: Tensor) -> None:
        size = cast("int", self._params.block_size)
        last = (lens - 1).clamp_(min=0).unsqueeze(1)
        positions = torch.minimum(torch.arange(self.group.keys, device=lens.device), last)
        # The host may have freed the blocks before all visible keys, and given them to other requests.
        positions = torch.maximum(positions, first)
        columns, offsets = divide(positions, size)
        # A request without keys has no block that could be read, not even in its first column.
        blocks, strides = table.gather(1, columns) * (lens > 0).unsqueeze(1), self._params.row_strides
        torch.add(blocks * size, offsets, out=self._slots.view(blocks.shape))
        if self._rows is not None and strides is not None:
            first_heads = blocks * strides[0] + offsets * strides[1]
            self._rows.copy_(head_rows(first_heads, self._params.num_kv_heads, strides[2]))

    def _first_visible(self, lens: Tensor) -> Tensor:
        """Return the first position that the rows of each member attend to, ``(members, 1)``."""
        first_row, visibility, chunk = lens - self.group.rows, self._params.visibility, self._params.chunk
        first = first_row - visibility.left if visibility.left >= 0 else torch.zeros_like(lens)
        if chunk is not None:
            first = torch.maximum(first, first_row - first_row % chunk)
        return first.clamp_(min=0).unsqueeze(1)

    def _same_chunk(self, lens: Tensor, chunk: int) -> Tensor:
        """Return whether a row and a key are in one chunk of chunked-local attention, ``(members, rows, keys)``."""
        rows = torch.arange(self.group.rows, device=lens.device)
        chunks = torch.div(lens.unsqueeze(1) - self.group.rows + rows, chunk, rounding_mode="floor")
        keys = torch.div(torch.arange(self.group.keys, device=lens.device), chunk, rounding_mode="floor")
        return chunks.unsqueeze(2) == keys
