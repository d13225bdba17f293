"""What the kernels know of a pattern. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def residue_of(
    head: tl.tensor,
    kv_head: tl.tensor,
    first: tl.int32,
    step: tl.int32,
    stride: tl.constexpr,
    by_kv_head: tl.constexpr,
) -> tl.tensor:
    """The number, modulo the stride, of the blocks that are vertical for a query head of this rank, or for several."""
    shift = (first + (kv_head if by_kv_head else head)) * step
    return stride - 1 - shift % stride


@triton.jit
def kinds_of(
    place: tl.tensor, end: tl.tensor, block: tl.constexpr, local: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    The first blocks of what a tile of rows, from `place` to `end` in the sequence, attends in three ways.

    Blocks before the first are attended where they are vertical, by all rows; those from there to the second are local
    to some rows; those from there to the third are local to all rows. The diagonal begins at the third.
    """
    diagonal = place // block
    some = tl.minimum(tl.maximum(diagonal - local + 1, 0), diagonal)
    every = tl.minimum(tl.maximum((end - 1) // block - local + 1, 0), diagonal)
    return some, every, diagonal
