"""Device functions that both kernels share: visible keys, and the online softmax over tiles of keys. Imports Triton."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on any device."""


@triton.jit
def first_key(
    position: tl.tensor, left: tl.int32, chunk: tl.int32, is_windowed: tl.constexpr, is_chunked: tl.constexpr
) -> tl.tensor:
    """Return the first key that a position attends to, by its window and chunk."""
    first = position * 0
    if is_windowed:
        first = tl.maximum(first, position - left)
    if is_chunked:
        first = tl.maximum(first, position // chunk * chunk)
    return first


@triton.jit
def last_key(
    position: tl.tensor, length: tl.int32, left: tl.int32, is_causal: tl.constexpr, is_windowed: tl.constexpr
) -> tl.tensor:
    """Return the last key that a position attends to. Without a causal mask, windows are as long on the right."""
    if is_causal:
        return tl.minimum(position, length - 1)
    elif is_windowed:
        return tl.minimum(position + left, length - 1)
    else:
        return position * 0 + length - 1


@triton.jit
def with_spans(
    first: tl.tensor,
    last: tl.tensor,
    spans: tl.tensor,
    at: tl.tensor,
    row_mask: tl.tensor,
    position: tl.tensor,
    length: tl.int32,
) -> tuple[tl.tensor, tl.tensor]:
    """
    Return the first and the last key of rows with the spans that they are in.

    Both ranges of keys have the row's position, and so they are one range together.
    """
    low = tl.load(spans + at * 2, mask=row_mask, other=-1)
    high = tl.load(spans + at * 2 + 1, mask=row_mask, other=-1)
    is_inside = (low >= 0) & (low <= position) & (position <= high)
    first = tl.where(is_inside, tl.minimum(first, low), first)
    return first, tl.where(is_inside, tl.maximum(last, tl.minimum(high, length - 1)), last)


@triton.jit
def held(count: tl.tensor, rank: tl.int32, ranks: tl.constexpr, interleave: tl.constexpr) -> tl.tensor:
    """
    Return how many of the first `count` keys of a request a rank of decode context parallelism holds.

    A rank holds its keys in the order of their positions, so that a range of positions is a range of its keys.
    """
    if ranks == 1:
        return count
    else:
        count = tl.maximum(count, 0)
        rest = count % (ranks * interleave) - rank * interleave
        return count // (ranks * interleave) * interleave + tl.minimum(tl.maximum(rest, 0), interleave)


@triton.jit
def rows_of_mask(
    mask: tl.tensor,
    starts: tl.tensor,
    stride: tl.int32,
    request: tl.tensor,
    token: tl.tensor,
    row_mask: tl.tensor,
    length: tl.int32,
    has_mask: tl.constexpr,
) -> tl.tensor:
    """Return where the rows of a custom mask begin. A stride of 0 is that of a request's keys, as in eager steps."""
    if has_mask:
        step = tl.where(stride == 0, length, stride).to(tl.int64)
        return mask + tl.load(starts + request) + tl.where(row_mask, token, 0) * step
    else:
        return token


@triton.jit
def first_rows(
    key: tl.tensor,
    value: tl.tensor,
    table: tl.tensor,
    request: tl.tensor,
    table_stride: tl.int64,
    k_token: tl.int64,
    v_token: tl.int64,
    page_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return where keys, values and pages of a request are. With a `page_size` of 0, `table` has their first rows."""
    if page_size == 0:
        row = tl.load(table + request).to(tl.int64)
        return key + row * k_token, value + row * v_token, table
    else:
        return key, value, table + request * table_stride


@triton.jit
def widen(tile: tl.tensor, like: tl.tensor, by_bits: tl.constexpr, interpreted: tl.constexpr) -> tl.tensor:
    """Return cached elements in the dtype of the queries; bytes of e4m3 `by_bits` are 256 times smaller than theirs."""
    if by_bits:
        bits = tile.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # float16 has 8 more in its exponent's bias
        return half.to(tl.float16, bitcast=True).to(like.dtype)
    elif tile.dtype == tl.int8 and like.dtype == tl.float16:
        # 1024 + u has u in its low bits: a conversion instruction would take the bytes one by one, at a lower rate.
        biased = (tile.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16)  # x + 128
        return (biased | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif tile.dtype == tl.float8e5 and interpreted:  # the interpreter makes subnormal numbers smaller
        return (tile.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(like.dtype)
    elif tile.dtype == tl.int8 and interpreted:  # the interpreter would return the integer as bits of bfloat16
        return tile.to(tl.float32).to(like.dtype)
    else:
        return tile.to(like.dtype)


@triton.jit
def load_records(
    base: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    like: tl.tensor,
    by_bits: tl.constexpr,
    interpreted: tl.constexpr,
) -> tl.tensor:
    """Return the latents of records of fp8_ds_mla: 512 codes, and a float32 scale for each 128 of them behind."""
    at = base.to(tl.pointer_type(tl.float32)) + (rows // 4)[:, None] + 128 + tl.arange(0, 4)[None, :]
    scales = tl.load(at, mask=is_row[:, None], other=0.0)
    columns = tl.arange(0, 4)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    codes = tl.load(base + rows[:, None, None] + columns, mask=is_row[:, None, None], other=0.0)
    wide = widen(codes, scales, by_bits, interpreted)
    if by_bits:
        scales = scales * 256.0
    return tl.reshape((wide * scales[:, :, None]).to(like.dtype), (rows.shape[0], 512))


@triton.jit
def multiply(a: tl.tensor, b: tl.tensor, acc: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """Return the accumulator plus a product. The interpreter multiplies bfloat16 as if its bits were integers."""
    if interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_queries(
    at: tl.tensor,
    row_mask: tl.tensor,
    size: tl.constexpr,
    size_v: tl.constexpr,
    width: tl.constexpr,
    width_v: tl.constexpr,
    is_latent: tl.constexpr,
    has_codes: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Return queries twice, and what each row is to be multiplied by; of latents their rotary elements, and those before.

    Those before are as many as a value's. With `has_codes` the KV cache is FP8, and queries of bfloat16 become float16:
    it holds all codes, and is one instruction away from two of them. A power of 2 brings a row into its range: one per
    row, so that a row does not depend on the others of its tile.
    """
    columns, mask = tl.arange(0, width)[None, :], row_mask[:, None]
    if is_latent:
        columns_v = tl.arange(0, width_v)[None, :]
        latent = tl.load(at[:, None] + columns_v, mask=mask & (columns_v < size_v), other=0.0)
        q = tl.load(at[:, None] + size_v + columns, mask=mask & (columns < size), other=0.0)
    else:
        q = tl.load(at[:, None] + columns, mask=mask & (columns < size), other=0.0)
        latent = q
    power = tl.full((at.shape[0],), 1.0, tl.float32)
    if has_codes and q.dtype == tl.bfloat16:
        largest = _largest_finite(q)
        if is_latent:
            largest = tl.maximum(largest, _largest_finite(latent))
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        # The largest element becomes 2^14 to 2^15, so that smaller ones keep their bits, and the power is finite.
        bits = tl.maximum(exponent, 0x07800000) - 0x07000000
        power, inverse = bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
        q, latent = (q.to(tl.float32) * inverse).to(tl.float16), (latent.to(tl.float32) * inverse).to(tl.float16)
    return q, latent, power


@triton.jit
def _largest_finite(tile: tl.tensor) -> tl.tensor:
    """Return the largest finite magnitude of each row of a tile."""
    magnitude = tl.abs(tile.to(tl.float32))
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1)


@triton.jit
def load_rows(
    base: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    size: tl.constexpr,
    width: tl.constexpr,
    is_selected: tl.constexpr,
) -> tl.tensor:
    """Return a tile of the KV cache, with zeros behind the elements of a row, and for rows that are not selected."""
    columns = tl.arange(0, width)[None, :]
    if is_selected:
        return tl.load(base + rows[:, None] + columns, mask=is_row[:, None] & (columns < size), other=0.0)
    elif size == width:
        return tl.load(base + rows[:, None] + columns)
    else:
        return tl.load(base + rows[:, None] + columns, mask=columns < size, other=0.0)


@triton.jit
def attend(  # noqa: C901, PLR0912 - forms of one loop, chosen at compile time
    begin: tl.int32,
    end: tl.int32,
    lowest: tl.int32,
    highest: tl.int32,
    diagonal: tl.int32,
    q: tl.tensor,
    q_latent: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    slope: tl.tensor,
    mask_rows: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    key_base: tl.tensor,
    value_base: tl.tensor,
    pages: tl.tensor,
    kv_head: tl.int32,
    k_page: tl.int64,
    k_token: tl.int64,
    v_page: tl.int64,
    v_token: tl.int64,
    num_slots: tl.int32,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    k_scale_page: tl.int64,
    v_scale_page: tl.int64,
    unit: tl.tensor,
    soft_cap: tl.float32,
    layer: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    width: tl.constexpr,
    width_v: tl.constexpr,
    page_size: tl.constexpr,
    has_first: tl.constexpr,
    has_mask: tl.constexpr,
    is_capped: tl.constexpr,
    alibi: tl.constexpr,
    is_masked: tl.constexpr,
    has_diagonal: tl.constexpr,
    by_bits: tl.constexpr,
    is_latent: tl.constexpr,
    is_records: tl.constexpr,
    is_by_token: tl.constexpr,
    is_selected: tl.constexpr,
    by_descriptor: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """
    Add the tiles of keys from `begin`, a multiple of `keys`, to `end` to the online softmax of some rows.

    Return the new ``(acc, row_max, row_sum)``. Row maxima are exponents of 2, and finite from the start: for rows
    without keys so far, scores of -inf get the weight 0, and the sums are rescaled by exp2(0).

    With `is_masked`, a row attends to the keys from `first` to `last`, and keys outside of `lowest` to `highest` are
    not loaded: their slots, and their pages, may hold anything. With `has_mask` besides, `mask_rows` are where the
    custom mask of each row begins. Otherwise tiles are loaded whole, and a row attends to all of their keys; with
    `has_diagonal`, to those up to `last` in the tiles from `diagonal` on.

    With `is_latent`, a value is the first part of its key, and `size` and `key_base` are those of the rotary part. The
    value's tile is loaded once, for both products. With `is_records` these are records of fp8_ds_mla.

    Products of queries and keys become scores to base 2 by `unit`, a factor of each row.

    With `is_by_token`, `k_scales` and `v_scales` are the scales of this KV head, those of a page one after the other.
    They are factors of the scores and of the weights, so that no code is rounded. Such weights are below the numbers of
    float16: in a `layer` of it, the scales are factors of the values.

    With a `page_size` of 0, keys are contiguous rows from `key_base` and `value_base` on, and `pages` is not read.

    With `is_selected`, `pages` are the slots of the keys. None outside of the `num_slots` of the KV cache is loaded.

    With `by_descriptor`, and without `is_masked`, `key_base` and `value_base` are tensor descriptors of the KV cache,
    which load tiles of `kv_head`.
    """
    offsets = tl.arange(0, keys)
    next_page = 0
    if by_descriptor:
        next_page = tl.load(pages + tl.maximum(tl.minimum(begin, highest), 0) // page_size)  # -1 without keys
    for index in tl.range(begin, end, keys, num_stages=stages):
        key_position = index + offsets
        at = key_position
        if is_masked:  # a weight of 0 times NaN is NaN: the nearest key of the range takes the place of others
            at = tl.minimum(at, highest)
            if has_first:
                at = tl.maximum(at, lowest)
        if by_descriptor:  # a tile ahead, so that the pipeline has a stage less
            tile = [next_page, index % page_size, kv_head, 0]
            next_page = tl.load(pages + tl.minimum(index + keys, highest) // page_size)
        elif is_selected:
            slot = tl.load(pages + at)
            is_row = (slot >= 0) & (slot < num_slots)
            slot = tl.where(is_row, slot, 0)
            page, slot = (slot // page_size).to(tl.int64), slot % page_size
        elif page_size == 0:
            is_row, page, slot = at >= 0, tl.zeros((), tl.int64), at
        else:
            is_row, slot = at >= 0, at % page_size
            if page_size % keys == 0:
                page = tl.load(pages + index // page_size).to(tl.int64)
            elif keys % page_size == 0 and not is_masked:  # no iteration computes the slots again
                slot = offsets % page_size
                page = tl.load(pages + index // page_size + offsets // page_size).to(tl.int64)
            else:
                page = tl.load(pages + at // page_size).to(tl.int64)
        if not by_descriptor:
            k_row, v_row = page * k_page + slot * k_token, page * v_page + slot * v_token
        scores = tl.zeros((q.shape[0], keys), tl.float32)
        if is_latent:
            if by_descriptor:
                v = tl.reshape(value_base.load(tile), (keys, width_v))
            elif is_records:
                v = load_records(value_base, v_row, is_row, q, by_bits, interpreted)
            else:
                v = load_rows(value_base, v_row, is_row, size_v, width_v, is_selected)
                v = widen(v, q, by_bits, interpreted)
            scores = multiply(q_latent, tl.trans(v), scores, interpreted)
        if size > 0:
            if by_descriptor:
                k = tl.reshape(key_base.load(tile), (keys, width))
            else:
                k = load_rows(key_base, k_row, is_row, size, width, is_selected)
                k = widen(k, q, by_bits and not is_records, interpreted)
            scores = multiply(q, tl.trans(k), scores, interpreted)
        if is_by_token:
            unwiden = 256.0 if by_bits else 1.0
            scores = scores * (tl.load(k_scales + page * k_scale_page + slot) * unwiden)[None, :]
            v_scale = tl.load(v_scales + page * v_scale_page + slot) * unwiden

        if is_capped:  # tanh(x) is 1 - 2 / (1 + exp(2 x)), without overflow for large |x|
            exponential = tl.math.exp2(scores * (unit * 2.0 / soft_cap)[:, None])
            scores = (soft_cap * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + exponential))
        elif alibi > 0:
            scores = scores * unit[:, None]
        if alibi > 0:
            distance = tl.abs(position[:, None] - key_position[None, :]).to(tl.float32)
            if alibi == 2:
                distance = tl.math.sqrt(distance)
            scores -= slope[:, None] * distance
        if is_masked:
            visible = key_position[None, :] <= last[:, None]
            if has_first:
                visible = visible & (key_position[None, :] >= first[:, None])
            if is_selected:
                visible = visible & is_row[None, :]
            if has_mask:
                shown = tl.load(mask_rows[:, None] + key_position[None, :], mask=visible, other=0)
                visible = visible & (shown != 0)
            scores = tl.where(visible, scores, float("-inf"))
        elif has_diagonal:  # noqa: SIM102 - a constant, and a condition
            if index >= diagonal:
                scores = tl.where(key_position[None, :] <= last[:, None], scores, float("-inf"))

        if is_capped or alibi > 0:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            probs = tl.math.exp2(scores - new_max[:, None])
        else:  # the factor is fused into the exponent
            new_max = tl.maximum(row_max, tl.max(scores, 1) * unit)
            probs = tl.math.exp2(scores * unit[:, None] - new_max[:, None])
        rescale = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max
        if not is_latent:
            if by_descriptor:
                v = tl.reshape(value_base.load(tile), (keys, width_v))
            else:
                v = load_rows(value_base, v_row, is_row, size_v, width_v, is_selected)
                v = widen(v, q, by_bits, interpreted)
        if is_by_token:
            if layer == tl.float16:
                v = (v.to(tl.float32) * v_scale[:, None]).to(tl.float16)
            else:
                v, probs = v.to(tl.bfloat16), probs * v_scale[None, :]
        if not interpreted:  # the interpreter truncates where a GPU rounds
            probs = probs.to(v.dtype)
        acc = multiply(probs, v, acc * rescale[:, None], interpreted)
    return acc, row_max, row_sum


@triton.jit
def load_scale(
    scales: tl.tensor,
    kv_head: tl.tensor,
    is_scaled: tl.constexpr,
    is_per_head: tl.constexpr,
    by_bits: tl.constexpr,
) -> tl.tensor:
    """Return the factor of cached elements as `widen` returns them."""
    factor = 256.0 if by_bits else 1.0
    if is_scaled:
        return tl.load(scales + (kv_head if is_per_head else 0)) * factor
    else:
        return tl.full((), factor, tl.float32)


@triton.jit
def start_softmax(rows: tl.constexpr, width_v: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return ``(acc, row_max, row_sum)`` before the first key."""
    return tl.zeros((rows, width_v), tl.float32), tl.full((rows,), -1e30, tl.float32), tl.zeros((rows,), tl.float32)


@triton.jit
def finish(
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    factor: tl.float32,
    head: tl.tensor,
    sinks: tl.tensor,
    row_mask: tl.tensor,
    is_first: tl.int1,
    has_sinks: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """
    Return outputs times a factor, and their LSEs to base 2: 0 and -inf without keys.

    Sinks, scores without values, join the sum if these are the first keys. They come last, so that the largest weight
    of a key is 1, which rounds to itself.
    """
    if has_sinks:
        sink = tl.load(sinks + head, mask=row_mask & is_first, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        new_max = tl.maximum(row_max, sink)
        rescale = tl.math.exp2(row_max - new_max)
        acc = acc * rescale[:, None]
        row_sum = row_sum * rescale + tl.math.exp2(sink - new_max)
        row_max = new_max
    has_keys = row_sum != 0  # NaN stays NaN
    result = acc * tl.where(has_keys, factor / row_sum, 0.0)[:, None]
    return result, tl.where(has_keys, row_max + tl.math.log2(row_sum), float("-inf"))
