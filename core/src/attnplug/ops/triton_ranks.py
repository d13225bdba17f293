"""Weighs a rank's partial output for the exchange, in one launch. Imported only where Triton is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from attnplug.ops.triton import Kernel

if TYPE_CHECKING:
    from torch import Tensor

_TILE: Final = 1024
"""Elements of a program."""


@triton.jit(do_not_specialize=["tokens"])
def _weigh(
    out: tl.tensor,
    lses: tl.tensor,
    parts: tl.tensor,
    total: tl.tensor,
    tokens: tl.int64,
    rank: tl.constexpr,
    ranks: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Each program weighs one tile of rows, each one head of one token."""
    heads = ranks * kv_heads * group
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.arange(0, width)
    rows = tokens * heads
    there = row < rows
    token, head = row // heads, row % heads
    # In the order of `gather_heads`: KV head, rank, and query head of the KV head on that rank.
    holder, of_rank = head // group % ranks, head // (group * ranks) * group + head % group
    highest = tl.load(lses + row, mask=there, other=float("-inf"))
    for other in tl.static_range(1, ranks):
        highest = tl.maximum(highest, tl.load(lses + other * rows + row, mask=there, other=float("-inf")))
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # without keys -inf - -inf would be NaN
    weights = tl.exp(tl.load(lses + row, mask=there, other=float("-inf")) - shift)
    for other in tl.static_range(1, ranks):
        weights += tl.exp(tl.load(lses + other * rows + row, mask=there, other=float("-inf")) - shift)
    weight = tl.exp(tl.load(lses + rank * rows + row, mask=there, other=float("-inf")) - shift)
    # The output of rows without keys may hold NaN: it is not loaded.
    filled = there & (weight > 0)
    weight = tl.where(filled, weight / weights, 0.0)
    inside = column < size
    found = tl.load(out + row[:, None] * size + column[None, :], mask=filled[:, None] & inside[None, :], other=0.0)
    place = (holder * tokens + token) * (kv_heads * group) + of_rank
    weighed = (found.to(tl.float32) * weight[:, None]).to(parts.dtype.element_ty)
    tl.store(parts + place[:, None] * size + column[None, :], weighed, mask=there[:, None] & inside[None, :])
    mine = there & (holder == rank)
    tl.store(total + token * (kv_heads * group) + of_rank, shift + tl.log(weights), mask=mine)


_kernel = Kernel(_weigh)


def weigh(out: Tensor, lses: Tensor, parts: Tensor, total: Tensor, rank: int, kv_heads: int) -> None:
    """Launch the kernel. Arguments as of `attnplug.ops.ranks.weigh`."""
    ranks, tokens, heads, size = parts.shape
    width = triton.next_power_of_2(size)
    tile = max(1, _TILE // width)
    constants = (rank, ranks, kv_heads, heads // kv_heads, size, tile, width)
    programs = -(-tokens * heads * ranks // tile)
    _kernel.run(programs, (out, lses, parts, total), (), (tokens,), constants, num_warps=4)
