"""The tensors of decodes and drafts, which one launch writes from SGLang's table of slots: of a step, or of graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from attnplug.contract import PAD_SLOT_ID, Batch

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.batching import SlotTable


@frozen(eq=False)
class Inputs:
    """
    Block table, lengths and slots of requests of one query length, in one part of the pools.

    Attributes:
        slots: SGLang's table of slots.
        block_table: ``(num_reqs, pages)`` int32.
        seq_lens: ``(num_reqs,)`` int32.
        slot_mapping: ``(num_reqs * query_len,)`` int64.
    """

    slots: SlotTable
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor

    @classmethod
    def made(cls, slots: SlotTable, num_reqs: int, query_len: int, pages: int) -> Inputs:
        """Return inputs that are not written yet."""
        device = slots.slots.device
        return cls(
            slots,
            torch.empty((num_reqs, pages), dtype=torch.int32, device=device),
            torch.empty((num_reqs,), dtype=torch.int32, device=device),
            torch.empty((num_reqs * query_len,), dtype=torch.int64, device=device),
        )

    def first(self, num_reqs: int, query_len: int) -> Inputs:
        """Return those of the first requests, in the same memory, as a graph reads them."""
        return Inputs(
            self.slots,
            self.block_table[:num_reqs],
            self.seq_lens[:num_reqs],
            self.slot_mapping[: num_reqs * query_len],
        )

    def clear(self, length: int) -> None:
        """Write requests of a length whose keys are in page 0, and which write nothing."""
        self.block_table.zero_()
        self.seq_lens.fill_(length)
        self.slot_mapping.fill_(PAD_SLOT_ID)

    def write(self, rows: Tensor, lengths: Tensor, new_slots: Tensor, query_len: int, drafts: int) -> None:
        """
        Write a step of SGLang, on the device. A request of length 0 is padding.

        Args:
            rows: ``(num_reqs,)``, the step's `req_pool_indices`.
            lengths: ``(num_reqs,)``, its `seq_lens`.
            new_slots: ``(tokens,)``, its `out_cache_loc`; tokens of padding may be left out.
            query_len: Query tokens of each request.
            drafts: Drafts that are verified, which SGLang counts in no length; 0 in a decode.
        """
        self.slots.write(
            rows,
            lengths,
            new_slots,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            slot_mapping=self.slot_mapping,
            query_len=query_len,
            num_new_tokens=drafts,
        )

    def batch(
        self, starts: tuple[Tensor, Tensor], longest: int, lengths: Tensor | None, *, causal: bool, **more: Any
    ) -> Batch:
        """
        Return them as a batch.

        Args:
            starts: Where queries start, on the device and on the CPU.
            longest: The longest sequence, or a bound.
            lengths: The sequence lengths on the CPU; None where no backend reads them.
            causal: Whether tokens attend to no later token.
            more: Further fields of `Batch`, by name.
        """
        reqs, tokens = self.seq_lens.shape[0], self.slot_mapping.shape[0]
        table, slots = self.block_table, self.slot_mapping
        is_cpu = table.is_cpu
        return Batch(
            query_start_loc=starts[0],
            seq_lens=self.seq_lens,
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=tokens // reqs,
            max_seq_len=longest,
            block_table=table,
            slot_mapping=slots,
            causal=causal,
            # All CPU copies are named: what is left out is looked for, in a call for each.
            query_start_loc_cpu=starts[1],
            seq_lens_cpu=self.seq_lens if is_cpu else lengths,
            block_table_cpu=table if is_cpu else None,
            slot_mapping_cpu=slots if is_cpu else None,
            encoder_seq_lens_cpu=None,
            dcp_local_seq_lens_cpu=None,
            key_start_loc_cpu=None,
            mm_prefix_range_cpu=None,
            max_encoder_seq_len=None,
            **more,
        )
