"""Device functions that the Triton kernels share: int8 quantization, scores, and the online softmax. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_scale(rows: tl.tensor) -> tl.tensor:
    """Return the scale of each row of floats, ``(rows,)``. A row of zeros has a small positive scale."""
    return tl.math.div_rn(tl.maximum(tl.max(tl.abs(rows), 1), 1e-30), 127.0)


@triton.jit
def to_int8(rows: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Return rows of floats over their scales as int8, rounded to nearest, ties to even."""
    found = tl.math.div_rn(rows, tl.broadcast_to(scales, rows.shape))
    found = tl.minimum(tl.maximum(found, -127.0), 127.0)
    # From 1.5 * 2**23 on the spacing of floats is 1: the addition rounds, and the low bits are the integer.
    return (found + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def tile_of_program(
    query_starts: tl.tensor,
    heads: tl.constexpr,
    num_reqs: tl.int32,
    num_tiles: tl.int32,
    first_req: tl.int32,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """
    Return what a prefill program computes: ``(head, request, tile, start, count)``.

    It is a tile of rows of one head, of `count` rows from row `start`. The tiles with the most keys are launched first.
    """
    program = tl.program_id(0)
    request = first_req + (program // heads) % num_reqs
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    return program % heads, request, num_tiles - 1 - program // (heads * num_reqs), start, count


@triton.jit
def load_queries(
    query_ptrs: tl.tensor, mask: tl.tensor, scale: tl.float32, is_capped: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return int8 queries, and the factors of their products: see `scale_scores`."""
    found = tl.load(query_ptrs, mask=mask, other=0.0).to(tl.float32)
    q_scale = row_scale(found)
    q = to_int8(found, q_scale[:, None])
    q_scale = q_scale * scale
    if not is_capped:
        q_scale = q_scale * 1.4426950408889634
    return q, q_scale


@triton.jit
def scale_scores(
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
    Return scores ``(rows, keys)``, which times `score_unit` are exponents of 2.

    `q_scale` includes the softmax scale, and without a soft cap log2(e); `slope` includes log2(e).
    """
    scores = products.to(tl.float32) * k_scale[None, :]
    if is_capped:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): no overflow for large |x|
        exponential = tl.math.exp2(scores * (q_scale * (2.8853900817779268 / soft_cap))[:, None])
        scores = (soft_cap * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + exponential))
    elif alibi > 0:
        scores = scores * q_scale[:, None]
    if alibi == 1:
        scores -= slope[:, None] * distance.to(tl.float32)
    if alibi == 2:
        scores -= slope[:, None] * tl.math.sqrt(tl.maximum(distance, 0).to(tl.float32))
    return scores


@triton.jit
def score_unit(q_scale: tl.tensor, is_capped: tl.constexpr, alibi: tl.constexpr) -> tl.tensor:
    """Return the last factor of the scores, ``(rows,)``: fused into the exponent, its multiplication is free."""
    if is_capped or alibi > 0:
        return tl.zeros_like(q_scale) + 1.0
    else:
        return q_scale


@triton.jit
def visible_at(distance: tl.tensor, left: tl.int32, is_windowed: tl.constexpr) -> tl.tensor:
    """Return whether a query attends to a key at this distance before it."""
    visible = distance >= 0
    if is_windowed:
        visible = visible & (distance <= left)
    return visible


@triton.jit
def online_softmax(scores: tl.tensor, unit: tl.tensor, row_max: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Return ``(probs, row_max, rescale)``: probabilities relative to the new maximum, and the factor of earlier sums.

    `row_max` is finite from the start: for rows without keys so far, scores of -inf get the probability 0, and the sums
    are rescaled by exp2(0).
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * unit)
    return tl.math.exp2(scores * unit[:, None] - new_max[:, None]), new_max, tl.math.exp2(row_max - new_max)


@triton.jit
def online_softmax_int8(
    scores: tl.tensor, unit: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """
    Return ``(probs, row_max, row_sum, rescale, tile_scale)``: int8 probabilities of a tile, and the factors of earlier
    sums and of the tile's own.

    Probabilities are relative to the maximum of their tile, so that tiles far below the row's maximum use all 127
    steps. The addition of 1.5 * 2**23 rounds: the low byte is the probability, and the low 20 bits of a sum are the
    sum of the probabilities.
    """
    tile_max = tl.maximum(tl.max(scores, 1) * unit, -1e30)
    new_max = tl.maximum(row_max, tile_max)
    probs = tl.math.exp2(scores * unit[:, None] - (tile_max - 6.98868468677217)[:, None])  # log2(127)
    bits = (probs + 12582912.0).to(tl.int32, bitcast=True)
    rescale, tile_scale = tl.math.exp2(row_max - new_max), tl.math.exp2(tile_max - new_max)
    row_sum = row_sum * rescale + (tl.sum(bits, 1) & 0xFFFFF).to(tl.float32) * tile_scale
    return bits.to(tl.int8), new_max, row_sum, rescale, tile_scale


@triton.jit
def unpack_int8_pairs(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """
    Return pairs of int8 neighbors, loaded as int16, as float16 ``(even, odd)``. Exact.

    1024 + u has u in its low bits, and the difference to 1152 is an integer. A conversion instruction would convert
    each byte at a lower rate.
    """
    biased = pairs.to(tl.uint16, bitcast=True) ^ 0x8080  # x + 128 in each byte
    even = ((biased & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    odd = ((biased >> 8) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return even, odd


@triton.jit
def pv_dot(probs: tl.tensor, values: tl.tensor, acc: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """Return the accumulator plus 16-bit probabilities times values. The interpreter does not multiply bfloat16."""
    probs = probs.to(values.dtype)
    if interpreted:
        return tl.dot(probs.to(tl.float32), values.to(tl.float32), acc)
    else:
        return tl.dot(probs, values, acc)
