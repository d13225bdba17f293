"""Deals the blocks of a cache out to the requests of a case, in no order that a backend could rely on."""

from __future__ import annotations

import random
from functools import reduce
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_kit.oracle.cases import Case


def shuffled_blocks(case: Case) -> tuple[Tensor, int]:
    """
    Return the block table ``(num_reqs, max_blocks)`` int32, and the number of blocks of the cache.

    No request gets block 0, nor one of another request, except those of a shared prefix. Unused entries name no block.
    """
    counts = [-(-max(length, 0) // case.block_size) for length in case.key_lens]
    num_blocks = max(2, 1 + sum(counts) + case.num_spare_blocks)
    blocks = list(range(1, num_blocks))
    random.Random(case.seed).shuffle(blocks)
    nowhere = num_blocks + 10**6
    table = torch.full((len(counts), max(counts, default=0)), nowhere, dtype=torch.int32)

    def give(free: list[int], row: int) -> list[int]:
        table[row, : counts[row]] = torch.tensor(free[: counts[row]], dtype=torch.int32)
        return free[counts[row] :]

    reduce(give, range(len(counts)), blocks)
    shared = case.common_prefix_len // case.block_size
    running = [row for row, length in enumerate(case.query_lens) if length]
    table[running, :shared] = table[running[:1], :shared]
    return table, num_blocks
