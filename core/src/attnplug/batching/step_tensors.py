"""The tensors of a step that follow from its lengths and its block table."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from attnplug.batching.slots import POSITIONS, slots_at
from attnplug.contract.inputs.batch import PAD_SLOT_ID

if TYPE_CHECKING:
    from torch import Tensor


def as_int32(values: list[int]) -> Tensor:
    """Return one or more numbers as a tensor, ten times as fast as `torch.tensor`."""
    return torch.frombuffer(array("i", values), dtype=torch.int32)


class StepTensors:
    """
    Adds lengths, positions and slots to the tensors of a step, padding included.

    Args:
        block_size: Slots per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers = torch.arange(0, device="cpu")

    def fill(
        self, host: dict[str, Tensor], lengths: tuple[Tensor | None, Tensor, Tensor], tokens: int, rows: int
    ) -> Tensor:
        """
        Add them, and return ``(num_reqs,)`` cached tokens.

        Args:
            host: The tensors, which have the block table with its padded requests.
            lengths: ``(num_reqs,)`` int32 each: new tokens, cached ones, and their sum; None for one new token each.
            tokens: New tokens of all requests.
            rows: Tokens after padding.
        """
        (query_lens, computed, seq_lens), table = lengths, host["block_table"]
        count, reqs = computed.shape[0], table.shape[0]
        if reqs > count:
            padding = computed.new_zeros(reqs - count)
            query_lens = None if query_lens is None else torch.cat([query_lens, padding])
            computed, seq_lens = torch.cat([computed, padding]), torch.cat([seq_lens, padding])
        if query_lens is None or tokens == count:  # one each
            starts, positions = torch.arange(reqs + 1, dtype=torch.int32, device="cpu"), computed.long()
            if reqs > count:
                starts.clamp_(max=count)
                positions = positions[:count]
            requests = self._numbers_to(count)
        else:
            starts = query_lens.new_zeros(reqs + 1)
            torch.cumsum(query_lens, 0, dtype=torch.int32, out=starts[1:])
            requests = torch.repeat_interleave(query_lens.long(), output_size=tokens)
            shifts = computed - starts[:-1]
            positions = torch.arange(tokens, device="cpu").add_(shifts.index_select(0, requests))
        slots = slots_at(table, requests, positions, self._block_size)
        if rows > tokens:
            slots = torch.cat([slots, slots.new_full((rows - tokens,), PAD_SLOT_ID)])
            positions = torch.cat([positions, positions.new_zeros(rows - tokens)])
        host |= {"query_start_loc": starts, "seq_lens": seq_lens, "slot_mapping": slots, POSITIONS: positions}
        return computed

    def _numbers_to(self, count: int) -> Tensor:
        """``(count,)`` int64 0, 1, 2, ..., kept between steps."""
        if self._numbers.shape[0] != count:
            self._numbers = torch.arange(count, device="cpu")
        return self._numbers
