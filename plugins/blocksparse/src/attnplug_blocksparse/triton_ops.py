"""The running softmax of the kernels. Imported only where Triton is."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether kernels are run by Triton's interpreter, on any device."""


@triton.jit
def scores_of(query: tl.tensor, key: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """The products of the rows of queries and of keys, in float32, not scaled yet."""
    key = key.to(query.dtype)
    if interpreted:  # the interpreter multiplies the bits of bfloat16
        return tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(query, tl.trans(key))


@triton.jit
def take_in(
    scores: tl.tensor,
    value: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    interpreted: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Take the scores of one tile of keys into the running softmax and the weighted sum of values.

    The largest score so far is kept in powers of two, and is finite from the start: where nothing was attended yet,
    scores of -inf weigh nothing, and what was summed up shrinks by exp2(0).
    """
    top = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.math.exp2(scores * scale - top[:, None])
    shrink = tl.math.exp2(highest - top)
    sums = sums * shrink + tl.sum(weights, 1)
    weights = weights.to(value.dtype)
    if interpreted:  # see above
        total = tl.dot(weights.to(tl.float32), value.to(tl.float32), total * shrink[:, None], input_precision="ieee")
    else:
        total = tl.dot(weights, value, total * shrink[:, None])
    return total, top, sums
