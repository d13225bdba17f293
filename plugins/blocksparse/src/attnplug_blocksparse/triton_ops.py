"""Device functions that the Triton kernels share: blocks of the pattern, and the online softmax. Imports Triton."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on any device."""


@triton.jit
def residue_of(
    head: tl.tensor,
    kv_head: tl.tensor,
    first: tl.int32,
    step: tl.int32,
    stride: tl.constexpr,
    by_kv_head: tl.constexpr,
) -> tl.tensor:
    """Return the block number, modulo the stride, of the vertical blocks of query heads of this rank."""
    shift = (first + (kv_head if by_kv_head else head)) * step
    return stride - 1 - shift % stride


@triton.jit
def block_bounds(
    begin: tl.tensor, end: tl.tensor, block: tl.constexpr, local: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Return three block numbers that divide the keys of a tile of rows, which are at `begin` to `end` in the sequence.

    Blocks before the first are attended to where they are vertical, by all rows. Blocks from the first to the second
    are local to some rows, blocks from the second to the third to all rows. The diagonal begins at the third.
    """
    diagonal = begin // block
    local_to_some = tl.minimum(tl.maximum(diagonal - local + 1, 0), diagonal)
    local_to_all = tl.minimum(tl.maximum((end - 1) // block - local + 1, 0), diagonal)
    return local_to_some, local_to_all, diagonal


@triton.jit
def qk_dot(query: tl.tensor, key: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """Return the products of query and key rows in float32, without the softmax scale."""
    key = key.to(query.dtype)
    if interpreted:  # the interpreter multiplies bfloat16 as if its bits were integers
        return tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(query, tl.trans(key))


@triton.jit
def softmax_step(
    scores: tl.tensor,
    value: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    scale: tl.tensor,
    interpreted: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Add one tile of keys to the online softmax, and return the new ``(acc, row_max, row_sum)``.

    `scale` includes log2(e), and `row_max` is an exponent of 2. It is finite from the start: for rows without keys so
    far, scores of -inf get the weight 0, and the sums are rescaled by exp2(0).
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    probs = tl.math.exp2(scores * scale - new_max[:, None])
    rescale = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(probs, 1)
    probs = probs.to(value.dtype)
    if interpreted:  # see qk_dot
        acc = tl.dot(probs.to(tl.float32), value.to(tl.float32), acc * rescale[:, None], input_precision="ieee")
    else:
        acc = tl.dot(probs, value, acc * rescale[:, None])
    return acc, new_max, row_sum
