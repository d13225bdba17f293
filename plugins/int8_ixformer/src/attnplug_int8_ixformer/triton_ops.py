"""What the kernels share: rounding rows to int8, scores of int8 products, and the running softmax. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_of(rows: tl.tensor) -> tl.tensor:
    """``(rows,)``: the scale of each row of floats. That of zeros is small, and positive."""
    return tl.math.div_rn(tl.maximum(tl.max(tl.abs(rows), 1), 1e-30), 127.0)


@triton.jit
def rounded(rows: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Rows of floats over their scales as int8; of two that are equally near, the even one."""
    found = tl.math.div_rn(rows, tl.broadcast_to(scales, rows.shape))
    found = tl.minimum(tl.maximum(found, -127.0), 127.0)
    return (found + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # from 1.5 * 2**23 on, bits count whole numbers


@triton.jit
def share_of(
    query_starts: tl.tensor,
    heads: tl.constexpr,
    num_reqs: tl.int32,
    num_tiles: tl.int32,
    first_req: tl.int32,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """
    ``(head, request, tile, start, count)`` of a program of prompts: a tile of rows of one head, out of `count` rows
    from row `start` on. Tiles that see most keys start first.
    """
    program = tl.program_id(0)
    request = first_req + (program // heads) % num_reqs
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    return program % heads, request, num_tiles - 1 - program // (heads * num_reqs), start, count


@triton.jit
def queries_of(
    rows_at: tl.tensor, wanted: tl.tensor, scale: tl.float32, is_capped: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """``(queries, scales)``: rows of floats as int8, and what their products are multiplied with, see `scores_of`."""
    found = tl.load(rows_at, mask=wanted, other=0.0).to(tl.float32)
    q_scale = scale_of(found)
    q = rounded(found, q_scale[:, None])
    q_scale = q_scale * scale
    if not is_capped:
        q_scale = q_scale * 1.4426950408889634
    return q, q_scale


@triton.jit
def scores_of(
    products: tl.tensor,
    q_scale: tl.tensor,
    k_scale: tl.tensor,
    distance: tl.tensor,
    slope: tl.tensor,
    soft_cap: tl.float32,
    is_capped: tl.constexpr,
    alibi: tl.constexpr,
) -> tl.tensor:
    """
    ``(rows, keys)``: scores, which times `unit_of` are exponents of 2.

    `q_scale` has the factor of the scores in it, and without a soft cap log2(e) too; `slope` has log2(e) in it.
    """
    scores = products.to(tl.float32) * k_scale[None, :]
    if is_capped:
        # tanh(x) is 1 - 2 / (1 + exp(2 x)), for large x and small ones too
        grown = tl.math.exp2(scores * (q_scale * (2.8853900817779268 / soft_cap))[:, None])
        scores = (soft_cap * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + grown))
    elif alibi > 0:
        scores = scores * q_scale[:, None]
    if alibi == 1:
        scores -= slope[:, None] * distance.to(tl.float32)
    if alibi == 2:
        scores -= slope[:, None] * tl.math.sqrt(tl.maximum(distance, 0).to(tl.float32))
    return scores


@triton.jit
def unit_of(q_scale: tl.tensor, is_capped: tl.constexpr, alibi: tl.constexpr) -> tl.tensor:
    """``(rows,)``: what scores are multiplied with last. Left for the exponent, it costs nothing there."""
    if is_capped or alibi > 0:
        return tl.zeros_like(q_scale) + 1.0
    else:
        return q_scale


@triton.jit
def seen_of(distance: tl.tensor, left: tl.int32, is_windowed: tl.constexpr) -> tl.tensor:
    """Whether a key is attended that stands so far before the query."""
    seen = distance >= 0
    if is_windowed:
        seen = seen & (distance <= left)
    return seen


@triton.jit
def raised(scores: tl.tensor, unit: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """``(weights, highest, shrunk)``: weights relative to the new maximum, and by how much what was summed shrinks."""
    above = tl.maximum(highest, tl.max(scores, 1) * unit)
    return tl.math.exp2(scores * unit[:, None] - above[:, None]), above, tl.math.exp2(highest - above)


@triton.jit
def weighed(
    scores: tl.tensor, unit: tl.tensor, highest: tl.tensor, sums: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """
    ``(weights, highest, sums, shrunk, grown)``: int8 weights of a tile, and what brings it and all before in line.

    Weights are relative to the maximum of their own tile, so that 127 steps are enough far below the row's. From
    1.5 * 2**23 on the bits of a float count whole numbers: the last byte is the weight, and in a sum of them the last
    20 bits are the sum of the weights.
    """
    most = tl.maximum(tl.max(scores, 1) * unit, -1e30)
    above = tl.maximum(highest, most)
    weights = tl.math.exp2(scores * unit[:, None] - (most - 6.98868468677217)[:, None])  # log2(127)
    bits = (weights + 12582912.0).to(tl.int32, bitcast=True)
    shrunk, grown = tl.math.exp2(highest - above), tl.math.exp2(most - above)
    sums = sums * shrunk + (tl.sum(bits, 1) & 0xFFFFF).to(tl.float32) * grown
    return bits.to(tl.int8), above, sums, shrunk, grown


@triton.jit
def halves_of(pairs: tl.tensor) -> tl.tensor:
    """
    ``(even, odd)`` float16: pairs of int8 neighbours, read as int16. Exact: 1024 + u has u as its last bits, and the
    difference to 1152 is a whole number. A conversion by number would take each byte through a slower unit.
    """
    moved = pairs.to(tl.uint16, bitcast=True) ^ 0x8080  # x + 128 in each byte
    even = ((moved & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    odd = ((moved >> 8) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return even, odd


@triton.jit
def attended(weights: tl.tensor, values: tl.tensor, total: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """``(rows, columns)``: 16-bit weights times values, added up. The interpreter multiplies no bfloat16."""
    weights = weights.to(values.dtype)
    if interpreted:
        return tl.dot(weights.to(tl.float32), values.to(tl.float32), total)
    else:
        return tl.dot(weights, values, total)
