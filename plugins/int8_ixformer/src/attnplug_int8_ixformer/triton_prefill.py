"""The kernels of prompts and chunks: the write into pages, the gathering of keys and values, and attention."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_int8_ixformer.triton_scores import (
    attended,
    queries_of,
    raised,
    rounded,
    scale_of,
    scores_of,
    seen_of,
    share_of,
    unit_of,
    weighed,
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
    """One program quantizes the heads of one token, and writes them into its slot; -1 is padding."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slots + token)
    if place < 0:
        return

    page, slot = place // page_size, place % page_size
    head, columns = tl.arange(0, lanes), tl.arange(0, width)
    wanted = (head < kv_heads)[:, None] & (columns < size)[None, :]
    k = tl.load(key + token * key_token + head[:, None] * key_head + columns[None, :], mask=wanted, other=0.0)
    k = k.to(tl.float32)
    k_scale = scale_of(k)
    keys_at = key_pages + page * k_page + slot * k_slot + head[:, None] * k_head + columns[None, :]
    tl.store(keys_at, rounded(k, k_scale[:, None]), mask=wanted)
    tl.store(key_scales + page * s_page + head * s_head + slot, k_scale, mask=head < kv_heads)
    v = tl.load(value + token * value_token + head[:, None] * value_head + columns[None, :], mask=wanted, other=0.0)
    if has_scales:
        v_scale = tl.load(value_scales + head[:, None] * size + columns[None, :], mask=wanted, other=1.0)
        v = rounded(v.to(tl.float32), v_scale)
    tl.store(value_pages + page * v_page + slot * v_slot + head[:, None] * v_head + columns[None, :], v, mask=wanted)


@triton.jit(do_not_specialize=["of_request", "num_tiles", "first_req", "left"])
def _gather(
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    turned: tl.tensor,
    lined: tl.tensor,
    lined_scales: tl.tensor,
    key_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    query_starts: tl.tensor,
    num_columns: tl.int64,
    of_request: tl.int64,
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
    One program lays values of one KV head with keys side by side, in which order alone tensor cores multiply bytes:
    ``(kv_heads * size, num_columns)``. With `has_keys` it copies keys and their scales out of the pages too, to
    ``(kv_heads * num_columns, size)`` and ``(kv_heads * num_columns,)``. Behind a sequence's last key there are zeros,
    and before the window of its first query.
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

    place = tile * keys + tl.arange(0, keys)
    columns = tl.arange(0, width)
    there, inside = (place < length) & (place >= first), columns < size
    wanted = there[:, None] & inside[None, :]
    page = tl.load(table + request * of_request + place // page_size, mask=there, other=0).to(tl.int64)
    slot, column = place % page_size, tl.load(key_starts + request) + place
    values_at = value_pages + kv_head * v_head + (page * v_page + slot * v_slot)[:, None]
    v = tl.load(values_at + columns[None, :], mask=wanted, other=0)
    rows = (kv_head * size + columns).to(tl.int64) * num_columns
    tl.store(turned + rows[:, None] + column[None, :], tl.trans(v), mask=inside[:, None])
    if has_keys:
        keys_at = key_pages + kv_head * k_head + (page * k_page + slot * k_slot)[:, None]
        k = tl.load(keys_at + columns[None, :], mask=wanted, other=0)
        k_scale = tl.load(key_scales + page * s_page + kv_head * s_head + slot, mask=there, other=0.0)
        row = kv_head * num_columns + column
        tl.store(lined + row[:, None] * size + columns[None, :], k, mask=inside[None, :])
        tl.store(lined_scales + row, k_scale)


@triton.jit
def _tiles(  # noqa: PLR0912 - forms of one loop, chosen when it is compiled
    begin: tl.int32,
    end: tl.int32,
    seen_from: tl.int32,
    q: tl.tensor,
    q_scale: tl.tensor,
    position: tl.tensor,
    slope: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    sums: tl.tensor,
    keys_at: tl.tensor,
    values_at: tl.tensor,
    scales_at: tl.tensor,
    pages: tl.tensor,
    k_page: tl.constexpr,
    k_slot: tl.constexpr,
    v_page: tl.constexpr,
    v_slot: tl.constexpr,
    s_page: tl.constexpr,
    turned_row: tl.int64,
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
    """Attend the keys from `begin` to `end`: all of them, or where `is_masked` those that a row may see."""
    unit = unit_of(q_scale, is_capped, alibi)
    columns, of_tile = tl.arange(0, width), tl.arange(0, keys)
    inside = columns < size
    for index in tl.range(begin, end, keys, num_stages=stages):
        place = index + of_tile
        if page_size % keys == 0:
            page = tl.load(pages + index // page_size).to(tl.int64)
            slot = index % page_size + of_tile
        else:
            at = tl.maximum(place, seen_from) if is_windowed else place  # blocks before the window may be gone
            page = tl.load(pages + at // page_size, mask=place < length, other=0).to(tl.int64)
            slot = at % page_size
        places = (page * k_page + slot * k_slot)[:, None] + columns[None, :]
        if is_masked:
            there = place < length
            k = tl.load(keys_at + places, mask=there[:, None] & inside[None, :], other=0)
            k_scale = tl.load(scales_at + page * s_page + slot, mask=there, other=0.0)
        elif size == width:
            k = tl.load(keys_at + places)
            k_scale = tl.load(scales_at + page * s_page + slot)
        else:
            k = tl.load(keys_at + places, mask=inside[None, :], other=0)
            k_scale = tl.load(scales_at + page * s_page + slot)
        distance = position[:, None] - place[None, :]
        products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        scores = scores_of(products, q_scale, k_scale, distance, slope, soft_cap, is_capped, alibi)
        if is_masked:
            scores = tl.where(seen_of(distance, left, is_windowed), scores, float("-inf"))
        if has_scales:
            weights, highest, sums, shrunk, grown = weighed(scores, unit, highest, sums)
            rows = values_at + columns.to(tl.int64)[:, None] * turned_row + place[None, :]
            if size == width:  # noqa: SIM108 - settled when it is compiled
                v = tl.load(rows)
            else:
                v = tl.load(rows, mask=inside[:, None], other=0)
            brought = tl.dot(weights, tl.trans(v), out_dtype=tl.int32).to(tl.float32)
            total = total * shrunk[:, None] + brought * grown[:, None]
        else:
            weights, highest, shrunk = raised(scores, unit, highest)
            sums = sums * shrunk + tl.sum(weights, 1)
            at = values_at + (page * v_page + slot * v_slot)[:, None] + columns[None, :]
            if is_masked:
                v = tl.load(at, mask=(place < length)[:, None] & inside[None, :], other=0.0)
            elif size == width:
                v = tl.load(at)
            else:
                v = tl.load(at, mask=inside[None, :], other=0.0)
            total = attended(weights, v, total * shrunk[:, None], interpreted)
    return total, highest, sums


@triton.jit(do_not_specialize=["of_request", "num_reqs", "num_tiles", "first_req", "left"])
def _prefill(
    query: tl.tensor,
    out: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    turned: tl.tensor,
    slopes: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    q_token: tl.int64,
    q_head: tl.int64,
    out_token: tl.int64,
    turned_row: tl.int64,
    of_request: tl.int64,
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
    keys_at, scales_at = key_pages + kv_head * k_head, key_scales + kv_head * s_head
    pages = table + request * of_request
    if has_scales:
        values_at = turned + (kv_head * size).to(tl.int64) * turned_row
        values_at += tl.multiple_of(tl.load(key_starts + request), 128)  # so that tiles are copied in words
    else:
        values_at = value_pages + kv_head * v_head
    lowest = length - count + tile * rows
    end = tl.minimum(lowest + rows, length)
    begin, edge = 0, (lowest + 1) // keys * keys  # all rows see the keys before the edge
    seen_from = 0
    if is_windowed:
        seen_from = tl.maximum(lowest - left, 0)
        begin = seen_from // keys * keys
        edge = begin
    total, highest, sums = _tiles(
        begin, edge, seen_from, q, q_scale, position, slope, total, highest, sums, keys_at, values_at, scales_at, pages,
        k_page, k_slot, v_page, v_slot, s_page, turned_row, length, left, soft_cap,
        size, width, page_size, is_windowed, is_capped, alibi, has_scales, False, keys, stages, interpreted,  # noqa: FBT003
    )  # fmt: skip
    total, highest, sums = _tiles(
        edge, end, seen_from, q, q_scale, position, slope, total, highest, sums, keys_at, values_at, scales_at, pages,
        k_page, k_slot, v_page, v_slot, s_page, turned_row, length, left, soft_cap,
        size, width, page_size, is_windowed, is_capped, alibi, has_scales, True, keys, stages, interpreted,  # noqa: FBT003
    )  # fmt: skip
    factor = tl.where(sums > 0, 1.0 / sums, 0.0)
    result = total * factor[:, None]
    if has_scales:
        result = result * tl.load(value_scales + kv_head * size + columns, mask=inside, other=1.0)[None, :]
    places = out + (start + row).to(tl.int64)[:, None] * out_token + head * size + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=mine[:, None] & inside[None, :])
