"""The kernels of prefills: cache writes, the gathering of keys and values, and attention. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_int8_ixformer.triton_ops import (
    load_queries,
    online_softmax,
    online_softmax_int8,
    pv_dot,
    row_scale,
    scale_scores,
    score_unit,
    tile_of_program,
    to_int8,
    visible_at,
)


@triton.jit
def _write(
    key: tl.tensor,
    value: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slots: tl.tensor,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    k_page: tl.constexpr,
    k_slot: tl.constexpr,
    k_head: tl.constexpr,
    v_page: tl.constexpr,
    v_slot: tl.constexpr,
    v_head: tl.constexpr,
    s_page: tl.constexpr,
    s_head: tl.constexpr,
    kv_heads: tl.constexpr,
    lanes: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    has_scales: tl.constexpr,
) -> None:
    """One program quantizes the heads of one token, and writes them to its slot; the slot -1 is padding."""
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(slots + token)
    if target < 0:
        return

    page, slot = target // page_size, target % page_size
    head, columns = tl.arange(0, lanes), tl.arange(0, width)
    tile_mask = (head < kv_heads)[:, None] & (columns < size)[None, :]
    k = tl.load(key + token * key_token + head[:, None] * key_head + columns[None, :], mask=tile_mask, other=0.0)
    k = k.to(tl.float32)
    k_scale = row_scale(k)
    key_base = key_pages + page * k_page + slot * k_slot + head[:, None] * k_head + columns[None, :]
    tl.store(key_base, to_int8(k, k_scale[:, None]), mask=tile_mask)
    tl.store(key_scales + page * s_page + head * s_head + slot, k_scale, mask=head < kv_heads)
    v = tl.load(value + token * value_token + head[:, None] * value_head + columns[None, :], mask=tile_mask, other=0.0)
    if has_scales:
        v_scale = tl.load(value_scales + head[:, None] * size + columns[None, :], mask=tile_mask, other=1.0)
        v = to_int8(v.to(tl.float32), v_scale)
    tl.store(value_pages + page * v_page + slot * v_slot + head[:, None] * v_head + columns[None, :], v, mask=tile_mask)


@triton.jit(do_not_specialize=["table_stride", "num_tiles", "first_req", "left"])
def _gather(
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    values_t: tl.tensor,
    flat_keys: tl.tensor,
    flat_scales: tl.tensor,
    key_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    query_starts: tl.tensor,
    num_columns: tl.int64,
    table_stride: tl.int64,
    num_tiles: tl.int32,
    first_req: tl.int32,
    left: tl.int32,
    k_page: tl.constexpr,
    k_slot: tl.constexpr,
    k_head: tl.constexpr,
    v_page: tl.constexpr,
    v_slot: tl.constexpr,
    v_head: tl.constexpr,
    s_page: tl.constexpr,
    s_head: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    is_windowed: tl.constexpr,
    has_keys: tl.constexpr,
    keys: tl.constexpr,
) -> None:
    """
    One program transposes a tile of values of one KV head to ``(kv_heads * size, num_columns)``, the only layout of
    the PV matmul in int8. With `has_keys` it also copies keys and their scales, to ``(kv_heads * num_columns, size)``
    and ``(kv_heads * num_columns,)``. Columns beyond the last key, and before the first query's window, are zeros.
    """
    program = tl.program_id(0)
    kv_head = program % kv_heads
    tile = (program // kv_heads) % num_tiles
    request = first_req + program // (kv_heads * num_tiles)
    length = tl.load(seq_lens + request)
    first = 0
    if is_windowed:
        count = tl.load(query_starts + request + 1) - tl.load(query_starts + request)
        first = tl.maximum(length - count - left, 0)
    if (tile * keys >= length) | ((tile + 1) * keys <= first):
        return

    key_position = tile * keys + tl.arange(0, keys)
    columns = tl.arange(0, width)
    key_mask, column_mask = (key_position < length) & (key_position >= first), columns < size
    tile_mask = key_mask[:, None] & column_mask[None, :]
    page = tl.load(table + request * table_stride + key_position // page_size, mask=key_mask, other=0).to(tl.int64)
    slot, column = key_position % page_size, tl.load(key_starts + request) + key_position
    value_base = value_pages + kv_head * v_head + (page * v_page + slot * v_slot)[:, None]
    v = tl.load(value_base + columns[None, :], mask=tile_mask, other=0)
    rows = (kv_head * size + columns).to(tl.int64) * num_columns
    tl.store(values_t + rows[:, None] + column[None, :], tl.trans(v), mask=column_mask[:, None])
    if has_keys:
        key_base = key_pages + kv_head * k_head + (page * k_page + slot * k_slot)[:, None]
        k = tl.load(key_base + columns[None, :], mask=tile_mask, other=0)
        k_scale = tl.load(key_scales + page * s_page + kv_head * s_head + slot, mask=key_mask, other=0.0)
        row = kv_head * num_columns + column
        tl.store(flat_keys + row[:, None] * size + columns[None, :], k, mask=column_mask[None, :])
        tl.store(flat_scales + row, k_scale)


@triton.jit
def _attend_tiles(  # noqa: PLR0912 - forms of one loop, chosen at compile time
    begin: tl.int32,
    end: tl.int32,
    first_visible: tl.int32,
    q: tl.tensor,
    q_scale: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    key_base: tl.tensor,
    value_base: tl.tensor,
    scale_base: tl.tensor,
    pages: tl.tensor,
    k_page: tl.constexpr,
    k_slot: tl.constexpr,
    v_page: tl.constexpr,
    v_slot: tl.constexpr,
    s_page: tl.constexpr,
    values_stride: tl.int64,
    length: tl.int32,
    left: tl.int32,
    soft_cap: tl.float32,
    size: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    is_windowed: tl.constexpr,
    is_capped: tl.constexpr,
    alibi: tl.constexpr,
    has_scales: tl.constexpr,
    is_masked: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
) -> tl.tensor:
    """Add the keys from `begin` to `end` to the online softmax; with `is_masked`, those visible to each row."""
    unit = score_unit(q_scale, is_capped, alibi)
    columns, key_offsets = tl.arange(0, width), tl.arange(0, keys)
    column_mask = columns < size
    for index in tl.range(begin, end, keys, num_stages=stages):
        key_position = index + key_offsets
        if page_size % keys == 0:
            page = tl.load(pages + index // page_size).to(tl.int64)
            slot = index % page_size + key_offsets
        else:
            at = (
                tl.maximum(key_position, first_visible) if is_windowed else key_position
            )  # earlier blocks may be freed already
            page = tl.load(pages + at // page_size, mask=key_position < length, other=0).to(tl.int64)
            slot = at % page_size
        offsets = (page * k_page + slot * k_slot)[:, None] + columns[None, :]
        if is_masked:
            key_mask = key_position < length
            k = tl.load(key_base + offsets, mask=key_mask[:, None] & column_mask[None, :], other=0)
            k_scale = tl.load(scale_base + page * s_page + slot, mask=key_mask, other=0.0)
        elif size == width:
            k = tl.load(key_base + offsets)
            k_scale = tl.load(scale_base + page * s_page + slot)
        else:
            k = tl.load(key_base + offsets, mask=column_mask[None, :], other=0)
            k_scale = tl.load(scale_base + page * s_page + slot)
        distance = position[:, None] - key_position[None, :]
        products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        scores = scale_scores(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
        if is_masked:
            scores = tl.where(visible_at(distance, left, is_windowed), scores, float("-inf"))
        if has_scales:
            probs, row_max, row_sum, rescale, tile_scale = online_softmax_int8(scores, unit, row_max, row_sum)
            rows = value_base + columns.to(tl.int64)[:, None] * values_stride + key_position[None, :]
            if size == width:  # noqa: SIM108 - settled at compile time
                v = tl.load(rows)
            else:
                v = tl.load(rows, mask=column_mask[:, None], other=0)
            tile_acc = tl.dot(probs, tl.trans(v), out_dtype=tl.int32).to(tl.float32)
            acc = acc * rescale[:, None] + tile_acc * tile_scale[:, None]
        else:
            probs, row_max, rescale = online_softmax(scores, unit, row_max)
            row_sum = row_sum * rescale + tl.sum(probs, 1)
            at = value_base + (page * v_page + slot * v_slot)[:, None] + columns[None, :]
            if is_masked:
                v = tl.load(at, mask=(key_position < length)[:, None] & column_mask[None, :], other=0.0)
            elif size == width:
                v = tl.load(at)
            else:
                v = tl.load(at, mask=column_mask[None, :], other=0.0)
            acc = pv_dot(probs, v, acc * rescale[:, None], interpreted)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["table_stride", "num_reqs", "num_tiles", "first_req", "left"])
def _prefill(
    query: tl.tensor,
    out: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    values_t: tl.tensor,
    slopes: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    q_token: tl.int64,
    q_head: tl.int64,
    out_token: tl.int64,
    values_stride: tl.int64,
    table_stride: tl.int64,
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
    rows: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
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
    key_base, scale_base = key_pages + kv_head * k_head, key_scales + kv_head * s_head
    pages = table + request * table_stride
    if has_scales:
        value_base = values_t + (kv_head * size).to(tl.int64) * values_stride
        value_base += tl.multiple_of(tl.load(key_starts + request), 128)  # aligned, so that loads are vectorized
    else:
        value_base = value_pages + kv_head * v_head
    first_position = length - count + tile * rows
    end = tl.minimum(first_position + rows, length)
    begin, unmasked_end = 0, (first_position + 1) // keys * keys  # all rows attend to the keys before it
    first_visible = 0
    if is_windowed:
        first_visible = tl.maximum(first_position - left, 0)
        begin = first_visible // keys * keys
        unmasked_end = begin
    acc, row_max, row_sum = _attend_tiles(
        begin, unmasked_end, first_visible, q, q_scale, position, slope, acc, row_max, row_sum, key_base, value_base,
        scale_base, pages, k_page, k_slot, v_page, v_slot, s_page, values_stride, length, left, soft_cap,
        size, width, page_size, is_windowed, is_capped, alibi, has_scales, False, keys, stages, interpreted,  # noqa: FBT003
    )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        unmasked_end, end, first_visible, q, q_scale, position, slope, acc, row_max, row_sum, key_base, value_base,
        scale_base, pages, k_page, k_slot, v_page, v_slot, s_page, values_stride, length, left, soft_cap,
        size, width, page_size, is_windowed, is_capped, alibi, has_scales, True, keys, stages, interpreted,  # noqa: FBT003
    )  # fmt: skip
    inverse = tl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    result = acc * inverse[:, None]
    if has_scales:
        result = result * tl.load(value_scales + kv_head * size + columns, mask=column_mask, other=1.0)[None, :]
    out_ptrs = out + (start + row).to(tl.int64)[:, None] * out_token + head * size + columns[None, :]
    tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
