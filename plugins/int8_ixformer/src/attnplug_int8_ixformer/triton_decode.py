"""The kernels of decodes: attention over int8 pages, with the write of new rows in it, and the merge of its parts."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_int8_ixformer.triton_scores import (
    attended,
    halves_of,
    queries_of,
    raised,
    rounded,
    scale_of,
    scores_of,
    seen_of,
    unit_of,
)


@triton.jit(do_not_specialize=["of_request", "num_reqs", "num_splits", "left"])
def _decode(  # noqa: C901, PLR0912 - forms of one loop, chosen when it is compiled
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_sums: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slopes: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    q_token: tl.int64,
    q_head: tl.int64,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    out_token: tl.int64,
    of_request: tl.int64,
    num_reqs: tl.int32,
    num_splits: tl.int32,
    left: tl.int32,
    scale: tl.float32,
    soft_cap: tl.float32,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    lanes: tl.constexpr,
    news: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    k_page: tl.constexpr,
    k_slot: tl.constexpr,
    k_head: tl.constexpr,
    v_page: tl.constexpr,
    v_slot: tl.constexpr,
    v_head: tl.constexpr,
    s_page: tl.constexpr,
    s_head: tl.constexpr,
    is_windowed: tl.constexpr,
    is_capped: tl.constexpr,
    alibi: tl.constexpr,
    has_scales: tl.constexpr,
    writes: tl.constexpr,
    is_split: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """
    One program computes one KV head of a request, or a part of its keys: query heads of all new tokens share a tile.

    Keys of the cache are those from before this step. The new rows are quantized by the last split, which attends what
    it writes, so that no program reads a slot that another one writes.
    """
    program = tl.program_id(0)
    kv_head = program % kv_heads
    request = (program // kv_heads) % num_reqs
    split = program // (kv_heads * num_reqs)
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    if count == 0:  # padding
        return

    length = tl.load(seq_lens + request)
    old = length - count if writes else length
    first = 0
    seen_from = 0
    if is_windowed:
        seen_from = tl.maximum(length - count - left, 0)  # what stands before may be gone, its blocks too
        first = seen_from // keys * keys
    tiles = (tl.maximum(old - first, 0) + keys - 1) // keys
    if is_windowed:
        tiles = tl.where(old > seen_from, tiles, 0)
    share = (tiles + num_splits - 1) // num_splits
    begin = first + split * share * keys
    end = tl.minimum(begin + share * keys, old)

    lane = tl.arange(0, lanes)
    token, head = lane // group, kv_head * group + lane % group
    mine = token < count
    position = length - count + token
    columns = tl.arange(0, width)
    inside = columns < size
    rows = query + (start + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + columns[None, :]
    q, q_scale = queries_of(rows, mine[:, None] & inside[None, :], scale, is_capped)
    slope = q_scale
    if alibi > 0:
        slope = tl.load(slopes + head, mask=mine, other=0.0) * 1.4426950408889634
    unit = unit_of(q_scale, is_capped, alibi)

    keys_at, values_at = key_pages + kv_head * k_head, value_pages + kv_head * v_head
    scales_at, pages = key_scales + kv_head * s_head, table + request * of_request
    highest = tl.full((lanes,), -1e30, tl.float32)  # finite: a row that has attended nothing yet shrinks by exp2(0)
    sums = tl.zeros((lanes,), tl.float32)
    half: tl.constexpr = width // 2 if has_scales else width
    total = tl.zeros((lanes, half), tl.float32)  # with scales: of the even columns, and `total_odd` of the odd ones
    total_odd = tl.zeros((lanes, half), tl.float32)
    pairs = tl.arange(0, half)
    of_tile = tl.arange(0, keys)

    for index in tl.range(begin, end, keys, num_stages=stages):
        place = index + of_tile
        # What is behind the end is read from the last slot, and left out below: loads without a mask take fewer steps.
        at = tl.minimum(place, end - 1)
        if is_windowed:
            at = tl.maximum(at, seen_from)
        if page_size % keys == 0:
            page, slot = tl.load(pages + index // page_size).to(tl.int64), at % page_size
        else:
            page, slot = tl.load(pages + at // page_size).to(tl.int64), at % page_size
        k_rows = keys_at + (page * k_page + slot * k_slot)[:, None]
        v_rows = values_at + (page * v_page + slot * v_slot)[:, None]
        k_scale = tl.load(scales_at + page * s_page + slot)
        if has_scales:  # as pairs of bytes, values reach the tensor cores the way that 16-bit numbers do
            v_rows = values_at.to(tl.pointer_type(tl.int16)) + (page * (v_page // 2) + slot * (v_slot // 2))[:, None]
        if size == width:
            k, v = tl.load(k_rows + columns[None, :]), tl.load(v_rows + pairs[None, :])
        else:
            k = tl.load(k_rows + columns[None, :], mask=inside[None, :], other=0)
            v = tl.load(v_rows + pairs[None, :], mask=(pairs < size * half // width)[None, :], other=0)
        distance = position[:, None] - place[None, :]
        products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        scores = scores_of(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
        scores = tl.where((place < end)[None, :] & seen_of(distance, left, is_windowed), scores, float("-inf"))
        weights, highest, shrunk = raised(scores, unit, highest)
        sums = sums * shrunk + tl.sum(weights, 1)
        if has_scales:
            even, odd = halves_of(v)
            total = attended(weights, even, total * shrunk[:, None], interpreted)
            total_odd = attended(weights, odd, total_odd * shrunk[:, None], interpreted)
        else:
            total = attended(weights, v, total * shrunk[:, None], interpreted)

    if has_scales:
        total = tl.interleave(total, total_odd)
        v_scale = tl.load(value_scales + kv_head * size + columns, mask=inside, other=1.0)
    if writes:  # noqa: SIM102 - settled when it is compiled
        if split == num_splits - 1:
            new = tl.arange(0, news)
            place = length - count + new
            is_new = new < count
            wanted = is_new[:, None] & inside[None, :]
            page = tl.load(pages + place // page_size, mask=is_new, other=0).to(tl.int64)
            slot = place % page_size
            row = (start + new).to(tl.int64)[:, None]
            brought = tl.load(key + row * key_token + kv_head * key_head + columns[None, :], mask=wanted, other=0.0)
            brought = brought.to(tl.float32)
            k_scale = scale_of(brought)
            k = rounded(brought, k_scale[:, None])
            tl.store(keys_at + (page * k_page + slot * k_slot)[:, None] + columns[None, :], k, mask=wanted)
            tl.store(scales_at + page * s_page + slot, k_scale, mask=is_new)
            v = tl.load(value + row * value_token + kv_head * value_head + columns[None, :], mask=wanted, other=0.0)
            if has_scales:
                v = rounded(v.to(tl.float32), v_scale[None, :])
            tl.store(values_at + (page * v_page + slot * v_slot)[:, None] + columns[None, :], v, mask=wanted)
            distance = position[:, None] - place[None, :]
            products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
            scores = scores_of(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
            scores = tl.where(is_new[None, :] & seen_of(distance, left, is_windowed), scores, float("-inf"))
            weights, highest, shrunk = raised(scores, unit, highest)
            sums = sums * shrunk + tl.sum(weights, 1)
            kind = tl.float16 if has_scales else v.dtype
            total = attended(weights, v.to(kind), total * shrunk[:, None], interpreted)

    factor = tl.where(sums > 0, 1.0 / sums, 0.0)
    result = total * factor[:, None]
    if has_scales:
        result = result * v_scale[None, :]
    stored = mine[:, None] & inside[None, :]
    if is_split:
        row = ((start + token).to(tl.int64) * (kv_heads * group) + head) * num_splits + split
        tl.store(parts + row[:, None] * size + columns[None, :], result, mask=stored)
        logarithm = tl.where(sums > 0, highest + tl.math.log2(sums), float("-inf"))
        tl.store(part_sums + row, logarithm, mask=mine)
    else:
        places = out + (start + token).to(tl.int64)[:, None] * out_token + head[:, None] * size + columns[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_reqs", "num_splits"])
def _merge(
    parts: tl.tensor,
    part_sums: tl.tensor,
    out: tl.tensor,
    query_starts: tl.tensor,
    out_token: tl.int64,
    num_reqs: tl.int32,
    num_splits: tl.int32,
    heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
) -> None:
    """One program merges the splits of one head of one token; rows behind the last request's are nobody's."""
    token = tl.program_id(0) // heads
    if token >= tl.load(query_starts + num_reqs):
        return

    head, split, columns = tl.program_id(0) % heads, tl.arange(0, most), tl.arange(0, width)
    row = (token * heads + head).to(tl.int64) * num_splits + split
    logarithms = tl.load(part_sums + row, mask=split < num_splits, other=float("-inf"))
    highest = tl.maximum(tl.max(logarithms, 0), -1e30)
    weights = tl.math.exp2(logarithms - highest)
    there = (weights > 0)[:, None] & (columns < size)[None, :]
    found = tl.load(parts + row[:, None] * size + columns[None, :], mask=there, other=0.0)
    sums = tl.sum(weights, 0)
    result = tl.sum(found * weights[:, None], 0) * tl.where(sums > 0, 1.0 / sums, 0.0)
    places = out + token.to(tl.int64) * out_token + head * size + columns
    tl.store(places, result.to(out.dtype.element_ty), mask=columns < size)
