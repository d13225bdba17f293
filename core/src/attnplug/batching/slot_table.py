"""A table that has the slot of each position, from which a step's block table, lengths and slots are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.batching.padding import NULL_BLOCK
from attnplug.contract.inputs.batch import PAD_SLOT_ID
from attnplug.ops.triton import triton_function

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class SlotTable:
    """
    An engine's table of slots, as SGLang keeps it.

    Attributes:
        slots: ``(table rows, positions)`` integers: the slot of each position. The slots of a block are consecutive,
            and its first one is a multiple of the block size.
        block_size: Slots per block.
        translation: ``(slots,)`` integers, the slot of another cache for each slot; None where there is one cache.
    """

    slots: Tensor
    block_size: int
    translation: Tensor | None = None

    def write(
        self,
        rows: Tensor,
        lengths: Tensor,
        new_slots: Tensor,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        slot_mapping: Tensor,
        query_len: int = 1,
        num_new_tokens: int = 0,
    ) -> None:
        """
        Write the tensors of a batch whose requests have one query length.

        A request of length 0 is padding: it gets no keys, the null block in a column for each new token, and its tokens
        get no slot. Further entries of the block table, behind the blocks of a request, may hold anything. Where Triton
        works, it is one launch on a GPU, which a graph may record; nothing waits for the device.

        Args:
            rows: ``(num_reqs,)`` integers, the row of each request in the table of slots.
            lengths: ``(num_reqs,)`` integers, 0 for padding.
            new_slots: ``(tokens,)`` integers, the slots of the new tokens; tokens behind them get none.
            block_table: ``(num_reqs, max_blocks)`` int32, written: the first `max_blocks` blocks of each request.
            seq_lens: ``(num_reqs,)`` int32, written.
            slot_mapping: ``(num_reqs * query_len,)`` int64, written.
            query_len: New tokens of each request.
            num_new_tokens: Tokens that `lengths` leaves out, of each request that is no padding.
        """
        size, translation = self.block_size, self.translation
        columns = min(block_table.shape[1], -(-self.slots.shape[1] // size))
        write = triton_function("attnplug.batching.triton_pages", "write_from_slots") if block_table.is_cuda else None
        if write is not None:
            given, out = (self.slots, rows, lengths, new_slots), (block_table, seq_lens, slot_mapping)
            write(given, translation, out, (columns, size, query_len, num_new_tokens))
            return
        if lengths.is_cpu:  # of a device, the longest is not read
            columns = min(columns, -(-(int(lengths.amax()) + num_new_tokens) // size))
        firsts, new = self.slots[rows.long(), : columns * size : size], new_slots[: slot_mapping.shape[0]]
        if translation is not None:
            firsts, new = translation[firsts.long()], translation[new.long()]
        block_table[:, :columns] = firsts // size if size > 1 else firsts
        seq_lens.copy_(lengths)
        if num_new_tokens:
            seq_lens.add_(seq_lens > 0, alpha=num_new_tokens)
        is_padding = seq_lens == 0
        block_table[:, :query_len].masked_fill_(is_padding[:, None], NULL_BLOCK)
        if query_len > 1:
            is_padding = is_padding.repeat_interleave(query_len)
        count = new.shape[0]
        if count < slot_mapping.shape[0]:
            slot_mapping[count:].fill_(PAD_SLOT_ID)
            is_padding, slot_mapping = is_padding[:count], slot_mapping[:count]
        slot_mapping.copy_(new).masked_fill_(is_padding, PAD_SLOT_ID)
