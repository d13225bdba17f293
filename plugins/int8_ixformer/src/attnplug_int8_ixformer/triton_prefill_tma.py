"""The kernel of long prefills at level 1, with gathered K/V loaded through TMA descriptors. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_int8_ixformer.triton_ops import (
    load_queries,
    online_softmax_int8,
    scale_scores,
    score_unit,
    tile_of_program,
    visible_at,
)


@triton.jit
def _attend_tiles(
    begin: tl.int32,
    end: tl.int32,
    first: tl.int32,
    q: tl.tensor,
    q_scale: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    key: tl.tensor,
    values_t: tl.tensor,
    scale_base: tl.tensor,
    key_row: tl.int32,
    value_row: tl.int32,
    left: tl.int32,
    soft_cap: tl.float32,
    is_windowed: tl.constexpr,
    is_capped: tl.constexpr,
    alibi: tl.constexpr,
    is_masked: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """Add the keys from `begin` to `end` to the online softmax; with `is_masked`, those visible to each row."""
    unit = score_unit(q_scale, is_capped, alibi)
    key_offsets = tl.arange(0, keys)
    for index in tl.range(begin, end, keys, num_stages=stages):
        key_position = index + key_offsets
        k = key.load([key_row + index, 0])
        k_scale = tl.load(scale_base + key_position)
        distance = position[:, None] - key_position[None, :]
        products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        scores = scale_scores(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
        if is_masked:
            scores = tl.where(visible_at(distance, left, is_windowed), scores, float("-inf"))
        probs, row_max, row_sum, rescale, tile_scale = online_softmax_int8(scores, unit, row_max, row_sum)
        v = values_t.load([value_row, first + index])
        tile_acc = tl.dot(probs, tl.trans(v), out_dtype=tl.int32).to(tl.float32)
        acc = acc * rescale[:, None] + tile_acc * tile_scale[:, None]
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_reqs", "num_tiles", "first_req", "left"])
def _prefill_tma(
    key: tl.tensor,
    values_t: tl.tensor,
    query: tl.tensor,
    out: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slopes: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    seq_lens: tl.tensor,
    q_token: tl.int64,
    q_head: tl.int64,
    out_token: tl.int64,
    num_columns: tl.int32,
    num_reqs: tl.int32,
    num_tiles: tl.int32,
    first_req: tl.int32,
    left: tl.int32,
    scale: tl.float32,
    soft_cap: tl.float32,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    is_windowed: tl.constexpr,
    is_capped: tl.constexpr,
    alibi: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """One program computes a tile of rows of one head of one request."""
    heads: tl.constexpr = kv_heads * group
    head, request, tile, start, count = tile_of_program(query_starts, heads, num_reqs, num_tiles, first_req)
    if tile * rows >= count:
        return

    kv_head, length = head // group, tl.load(seq_lens + request)
    row = tile * rows + tl.arange(0, rows)
    columns = tl.arange(0, width)
    row_mask, column_mask = row < count, columns < size
    position = length - count + row
    at = query + (start + row).to(tl.int64)[:, None] * q_token + head * q_head + columns[None, :]
    q, q_scale = load_queries(at, row_mask[:, None] & column_mask[None, :], scale, is_capped)
    slope = q_scale
    if alibi > 0:
        slope = tl.zeros((rows,), tl.float32) + tl.load(slopes + head) * 1.4426950408889634

    row_max = tl.full((rows,), -1e30, tl.float32)  # finite: see online_softmax
    row_sum = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, width), tl.float32)
    first = tl.load(key_starts + request)
    key_row = kv_head * num_columns + first
    scale_base = key_scales + key_row
    first_position = length - count + tile * rows
    end = tl.minimum(first_position + rows, length)
    begin, unmasked_end = 0, (first_position + 1) // keys * keys  # all rows attend to the keys before it
    if is_windowed:
        begin = tl.maximum(first_position - left, 0) // keys * keys
        unmasked_end = begin
    acc, row_max, row_sum = _attend_tiles(
        begin, unmasked_end, first, q, q_scale, position, slope, acc, row_max, row_sum, key, values_t, scale_base,
        key_row, kv_head * size, left, soft_cap, is_windowed, is_capped, alibi, False, keys, stages,  # noqa: FBT003
    )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        unmasked_end, end, first, q, q_scale, position, slope, acc, row_max, row_sum, key, values_t, scale_base,
        key_row, kv_head * size, left, soft_cap, is_windowed, is_capped, alibi, True, keys, stages,  # noqa: FBT003
    )  # fmt: skip
    inverse = tl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    result = acc * inverse[:, None]
    result = result * tl.load(value_scales + kv_head * size + columns, mask=column_mask, other=1.0)[None, :]
    out_ptrs = out + (start + row).to(tl.int64)[:, None] * out_token + head * size + columns[None, :]
    tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
