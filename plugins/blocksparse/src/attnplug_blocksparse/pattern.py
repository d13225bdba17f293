"""A pattern as the kernels take it: numbers that are compiled in, and per KV head which blocks its heads attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from attnplug_blocksparse.params import BlocksparseParams


@frozen(eq=False)
class Pattern:
    """
    Parameters with what is derived from them, once for all steps, and before the first: what a forward copies to the
    device it would wait for, and a graph's capture forbids.

    The kernels find the blocks of a row from these numbers: there is no list of blocks, and no mask.

    Attributes:
        params: The parameters of this rank.
        device: Where the tables are.
        residues: ``(num_kv_heads, vert_stride)`` int32: the residues of each group's vertical blocks, rising, then
            zeros.
        before: ``(num_kv_heads, vert_stride + 1)`` int32: how many of these residues are less than 0, 1, ..., all.
    """

    params: BlocksparseParams
    device: torch.device
    residues: Tensor = field(init=False)
    before: Tensor = field(init=False)

    @residues.default
    def _residues(self) -> Tensor:
        found = torch.zeros(self.params.num_kv_heads, self.params.vert_stride, dtype=torch.int32)
        for head, row in enumerate(found):
            residues = self.params.residues(head)
            row[: len(residues)] = torch.tensor(residues, dtype=torch.int32)
        return found.to(self.device)

    @before.default
    def _before(self) -> Tensor:
        found = torch.zeros(self.params.num_kv_heads, self.params.vert_stride + 1, dtype=torch.int32)
        for head, row in enumerate(found):
            row[torch.tensor(self.params.residues(head)) + 1] = 1
        return found.cumsum(1, dtype=torch.int32).to(self.device)

    @property
    def constants(self) -> tuple[int, int, int, bool]:
        """
        Block size, local blocks, vertical stride, and whether the pattern slides by KV heads.

        No more than the longest sequence has: one block is then as good as a longer one, and nothing overflows.
        """
        params = self.params
        block = min(params.block_size, params.max_seqlen)
        local = min(params.local_blocks, -(-params.max_seqlen // block))
        return block, local, params.vert_stride, params.slides_by_kv_head

    @property
    def numbers(self) -> tuple[int, int]:
        """The first head of this rank, and the blocks by which the pattern slides per head."""
        return self.params.first, abs(self.params.head_sliding_step)

    def most_blocks(self, length: int) -> int:
        """Return how many blocks the heads of a KV head attend together, at most, in a decode at this length."""
        blocks = -(-length // self.params.block_size)
        most = max(len(self.params.residues(head)) for head in range(self.params.num_kv_heads))
        return min(blocks, self.params.local_blocks + -(-blocks // self.params.vert_stride) * most)
