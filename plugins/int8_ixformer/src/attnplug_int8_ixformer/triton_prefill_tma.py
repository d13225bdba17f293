"""The kernel for long prompts at level 1, whose keys and values are loaded by descriptors. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_int8_ixformer.triton_scores import queries_of, scores_of, seen_of, share_of, unit_of, weighed


@triton.jit
def _loop(
    begin: tl.int32,
    end: tl.int32,
    first: tl.int32,
    q: tl.tensor,
    q_scale: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    sums: tl.tensor,
    key: tl.tensor,
    turned: tl.tensor,
    scales_at: tl.tensor,
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
    """Attend the keys from `begin` to `end`: all of them, or where `is_masked` those that a row may see."""
    unit = unit_of(q_scale, is_capped, alibi)
    of_tile = tl.arange(0, keys)
    for index in tl.range(begin, end, keys, num_stages=stages):
        place = index + of_tile
        k = key.load([key_row + index, 0])
        k_scale = tl.load(scales_at + place)
        distance = position[:, None] - place[None, :]
        products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        scores = scores_of(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
        if is_masked:
            scores = tl.where(seen_of(distance, left, is_windowed), scores, float("-inf"))
        weights, highest, sums, shrunk, grown = weighed(scores, unit, highest, sums)
        v = turned.load([value_row, first + index])
        brought = tl.dot(weights, tl.trans(v), out_dtype=tl.int32).to(tl.float32)
        total = total * shrunk[:, None] + brought * grown[:, None]
    return total, highest, sums


@triton.jit(do_not_specialize=["of_request", "num_reqs", "num_tiles", "first_req", "left"])
def _prompt(
    key: tl.tensor,
    turned: tl.tensor,
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
    """One program computes some rows of one head of one request."""
    heads: tl.constexpr = kv_heads * group
    head, request, tile, start, count = share_of(query_starts, heads, num_reqs, num_tiles, first_req)
    if tile * rows >= count:
        return

    kv_head, length = head // group, tl.load(seq_lens + request)
    row = tile * rows + tl.arange(0, rows)
    columns = tl.arange(0, width)
    mine, inside = row < count, columns < size
    position = length - count + row
    at = query + (start + row).to(tl.int64)[:, None] * q_token + head * q_head + columns[None, :]
    q, q_scale = queries_of(at, mine[:, None] & inside[None, :], scale, is_capped)
    slope = q_scale
    if alibi > 0:
        slope = tl.zeros((rows,), tl.float32) + tl.load(slopes + head) * 1.4426950408889634

    highest = tl.full((rows,), -1e30, tl.float32)  # finite: a row that has attended nothing yet shrinks by exp2(0)
    sums = tl.zeros((rows,), tl.float32)
    total = tl.zeros((rows, width), tl.float32)
    first = tl.load(key_starts + request)
    key_row = kv_head * num_columns + first
    scales_at = key_scales + key_row
    lowest = length - count + tile * rows
    end = tl.minimum(lowest + rows, length)
    begin, edge = 0, (lowest + 1) // keys * keys  # all rows see the keys before the edge
    if is_windowed:
        begin = tl.maximum(lowest - left, 0) // keys * keys
        edge = begin
    total, highest, sums = _loop(
        begin, edge, first, q, q_scale, position, slope, total, highest, sums, key, turned, scales_at, key_row,
        kv_head * size, left, soft_cap, is_windowed, is_capped, alibi, False, keys, stages,  # noqa: FBT003
    )  # fmt: skip
    total, highest, sums = _loop(
        edge, end, first, q, q_scale, position, slope, total, highest, sums, key, turned, scales_at, key_row,
        kv_head * size, left, soft_cap, is_windowed, is_capped, alibi, True, keys, stages,  # noqa: FBT003
    )  # fmt: skip
    factor = tl.where(sums > 0, 1.0 / sums, 0.0)
    result = total * factor[:, None]
    result = result * tl.load(value_scales + kv_head * size + columns, mask=inside, other=1.0)[None, :]
    places = out + (start + row).to(tl.int64)[:, None] * out_token + head * size + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=mine[:, None] & inside[None, :])
