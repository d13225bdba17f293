"""The kernel of decodes: attention over an int8 KV cache, with the write of new rows, and split KV. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_int8_ixformer.triton_ops import (
    load_queries,
    online_softmax,
    pv_dot,
    row_scale,
    scale_scores,
    score_unit,
    to_int8,
    unpack_int8_pairs,
    visible_at,
)


@triton.jit(do_not_specialize=["table_stride", "num_reqs", "num_splits", "left"])
def _decode(  # noqa: C901, PLR0912 - forms of one loop, chosen at compile time
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_lse: tl.tensor,
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
    table_stride: tl.int64,
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
    One program computes a split of one KV head of a request: the query heads of all new tokens are rows of one tile.

    The loop reads the keys from before this step. The last split quantizes and writes the new rows, and attends to them
    from registers, so that no program reads a slot that another one writes.
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
    cached = length - count if writes else length
    first = 0
    first_visible = 0
    if is_windowed:
        first_visible = tl.maximum(length - count - left, 0)  # earlier blocks may be freed already
        first = first_visible // keys * keys
    tiles = (tl.maximum(cached - first, 0) + keys - 1) // keys
    if is_windowed:
        tiles = tl.where(cached > first_visible, tiles, 0)
    keys_per_split = (tiles + num_splits - 1) // num_splits
    begin = first + split * keys_per_split * keys
    end = tl.minimum(begin + keys_per_split * keys, cached)

    lane = tl.arange(0, lanes)
    token, head = lane // group, kv_head * group + lane % group
    row_mask = token < count
    position = length - count + token
    columns = tl.arange(0, width)
    column_mask = columns < size
    query_ptrs = query + (start + token).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + columns[None, :]
    q, q_scale = load_queries(query_ptrs, row_mask[:, None] & column_mask[None, :], scale, is_capped)
    slope = q_scale
    if alibi > 0:
        slope = tl.load(slopes + head, mask=row_mask, other=0.0) * 1.4426950408889634
    unit = score_unit(q_scale, is_capped, alibi)

    key_base, value_base = key_pages + kv_head * k_head, value_pages + kv_head * v_head
    scale_base, page_ptrs = key_scales + kv_head * s_head, table + request * table_stride
    row_max = tl.full((lanes,), -1e30, tl.float32)  # finite: see online_softmax
    row_sum = tl.zeros((lanes,), tl.float32)
    half: tl.constexpr = width // 2 if has_scales else width
    acc = tl.zeros((lanes, half), tl.float32)  # level 1: of the even columns; `acc_odd` of the odd ones
    acc_odd = tl.zeros((lanes, half), tl.float32)
    pairs = tl.arange(0, half)
    key_offsets = tl.arange(0, keys)

    for index in tl.range(begin, end, keys, num_stages=stages):
        key_position = index + key_offsets
        # Positions beyond the end load the last slot, and are masked below: loads without masks are faster.
        at = tl.minimum(key_position, end - 1)
        if is_windowed:
            at = tl.maximum(at, first_visible)
        if page_size % keys == 0:
            page, slot = tl.load(page_ptrs + index // page_size).to(tl.int64), at % page_size
        else:
            page, slot = tl.load(page_ptrs + at // page_size).to(tl.int64), at % page_size
        k_rows = key_base + (page * k_page + slot * k_slot)[:, None]
        v_rows = value_base + (page * v_page + slot * v_slot)[:, None]
        k_scale = tl.load(scale_base + page * s_page + slot)
        if has_scales:  # int8 pairs are loaded as int16, which 16-bit MMAs can take after unpacking
            v_rows = value_base.to(tl.pointer_type(tl.int16)) + (page * (v_page // 2) + slot * (v_slot // 2))[:, None]
        if size == width:
            k, v = tl.load(k_rows + columns[None, :]), tl.load(v_rows + pairs[None, :])
        else:
            k = tl.load(k_rows + columns[None, :], mask=column_mask[None, :], other=0)
            v = tl.load(v_rows + pairs[None, :], mask=(pairs < size * half // width)[None, :], other=0)
        distance = position[:, None] - key_position[None, :]
        products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        scores = scale_scores(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
        scores = tl.where(
            (key_position < end)[None, :] & visible_at(distance, left, is_windowed), scores, float("-inf")
        )
        probs, row_max, rescale = online_softmax(scores, unit, row_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        if has_scales:
            even, odd = unpack_int8_pairs(v)
            acc = pv_dot(probs, even, acc * rescale[:, None], interpreted)
            acc_odd = pv_dot(probs, odd, acc_odd * rescale[:, None], interpreted)
        else:
            acc = pv_dot(probs, v, acc * rescale[:, None], interpreted)

    if has_scales:
        acc = tl.interleave(acc, acc_odd)
        v_scale = tl.load(value_scales + kv_head * size + columns, mask=column_mask, other=1.0)
    if writes:  # noqa: SIM102 - settled at compile time
        if split == num_splits - 1:
            new = tl.arange(0, news)
            key_position = length - count + new
            is_new = new < tl.where(length > 0, count, 0)  # padding in a graph has rows, and no key
            new_mask = is_new[:, None] & column_mask[None, :]
            page = tl.load(page_ptrs + key_position // page_size, mask=is_new, other=0).to(tl.int64)
            slot = key_position % page_size
            row = (start + new).to(tl.int64)[:, None]
            new_keys = tl.load(key + row * key_token + kv_head * key_head + columns[None, :], mask=new_mask, other=0.0)
            new_keys = new_keys.to(tl.float32)
            k_scale = row_scale(new_keys)
            k = to_int8(new_keys, k_scale[:, None])
            tl.store(key_base + (page * k_page + slot * k_slot)[:, None] + columns[None, :], k, mask=new_mask)
            tl.store(scale_base + page * s_page + slot, k_scale, mask=is_new)
            v = tl.load(value + row * value_token + kv_head * value_head + columns[None, :], mask=new_mask, other=0.0)
            if has_scales:
                v = to_int8(v.to(tl.float32), v_scale[None, :])
            tl.store(value_base + (page * v_page + slot * v_slot)[:, None] + columns[None, :], v, mask=new_mask)
            distance = position[:, None] - key_position[None, :]
            products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
            scores = scale_scores(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
            scores = tl.where(is_new[None, :] & visible_at(distance, left, is_windowed), scores, float("-inf"))
            probs, row_max, rescale = online_softmax(scores, unit, row_max)
            row_sum = row_sum * rescale + tl.sum(probs, 1)
            kind = tl.float16 if has_scales else v.dtype
            acc = pv_dot(probs, v.to(kind), acc * rescale[:, None], interpreted)

    has_keys = row_sum > 0  # a row without one may hold NaN in its query
    result = tl.where(has_keys[:, None], acc * (1.0 / tl.where(has_keys, row_sum, 1.0))[:, None], 0.0)
    if has_scales:
        result = result * v_scale[None, :]
    store_mask = row_mask[:, None] & column_mask[None, :]
    if is_split:
        at = ((start + token).to(tl.int64) * (kv_heads * group) + head) * num_splits + split
        tl.store(parts + at[:, None] * size + columns[None, :], result, mask=store_mask)
        log2_lse = tl.where(has_keys, row_max + tl.math.log2(row_sum), float("-inf"))
        tl.store(part_lse + at, log2_lse, mask=row_mask)
    else:
        out_ptrs = out + (start + token).to(tl.int64)[:, None] * out_token + head[:, None] * size + columns[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=store_mask)
