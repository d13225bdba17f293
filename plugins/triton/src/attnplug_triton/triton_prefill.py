"""The kernel of longer queries. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_triton.triton_ops import (
    attend,
    finish,
    first_key,
    first_rows,
    held,
    last_key,
    load_queries,
    load_scale,
    rows_of_mask,
    start_softmax,
    with_spans,
)


@triton.jit
def _request_of(
    tile: tl.int32, query_starts: tl.tensor, num_reqs: tl.int32, group: tl.constexpr, rows: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """
    Return the request of a tile, and the tile's number in it.

    Request i has the tiles from ``query_starts[i] * group // rows + i`` on: at least as many as it needs. The last one
    that begins at or before the tile is counted, 128 at a time, which is one load for most batches.
    """
    lanes = tl.arange(0, 128)
    found = 0
    for index in tl.range(0, num_reqs, 128):
        lane = index + lanes
        begins = tl.load(query_starts + lane, mask=lane < num_reqs, other=0) * group // rows + lane
        found += tl.sum(((begins <= tile) & (lane < num_reqs)).to(tl.int32), 0)
    request = found - 1
    return request, tile - (tl.load(query_starts + request) * group // rows + request)


@triton.jit(do_not_specialize=["table_stride", "num_reqs", "mask_stride", "rank", "num_tiles", "left", "chunk"])
def _prefill(
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    spans: tl.tensor,
    mask: tl.tensor,
    mask_starts: tl.tensor,
    q_token: tl.int64,
    q_head: tl.int64,
    k_page: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_page: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    out_token: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    k_scale_page: tl.int64,
    k_scale_head: tl.int64,
    v_scale_page: tl.int64,
    v_scale_head: tl.int64,
    table_stride: tl.int64,
    num_reqs: tl.int32,
    mask_stride: tl.int32,
    rank: tl.int32,
    left: tl.int32,
    chunk: tl.int32,
    scale: tl.float32,
    soft_cap: tl.float32,
    num_tiles: tl.int32,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    width: tl.constexpr,
    width_v: tl.constexpr,
    page_size: tl.constexpr,
    short: tl.constexpr,
    is_causal: tl.constexpr,
    is_windowed: tl.constexpr,
    is_chunked: tl.constexpr,
    is_capped: tl.constexpr,
    alibi: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    has_spans: tl.constexpr,
    has_mask: tl.constexpr,
    is_scaled: tl.constexpr,
    is_per_head: tl.constexpr,
    by_bits: tl.constexpr,
    is_latent: tl.constexpr,
    is_records: tl.constexpr,
    is_by_token: tl.constexpr,
    interpreted: tl.constexpr,
    ranks: tl.constexpr,
    interleave: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    joins_diagonal: tl.constexpr,
    by_descriptor: tl.constexpr,
) -> None:
    """
    One program computes a tile of rows of one KV head and request: its query heads for some new tokens.

    Requests with at most `short` new tokens are not computed here. With `ranks` the keys are those of a rank of decode
    context parallelism, and `seq_lens` those of whole requests. Of each request, the tile with the most keys is
    launched first.

    With `joins_diagonal`, one loop has the tiles that all rows attend to, and those of the diagonal, masked under a
    branch: another loop has to fill its pipeline first. With `by_descriptor`, `key_pages` and `value_pages` are tensor
    descriptors of `key` and `value`, and a page is one or more tiles.
    """
    program = tl.program_id(0)
    kv_head = program % kv_heads
    request, tile = _request_of(num_tiles - 1 - program // kv_heads, query_starts, num_reqs, group, rows)
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    first_row = tile * rows
    if (count <= short) | (first_row >= count * group):
        return

    length = tl.load(seq_lens + request)
    row = first_row + tl.arange(0, rows)
    row_mask = row < count * group
    token, head = row // group, kv_head * group + row % group
    position = length - count + token
    first_position = length - count + first_row // group
    last_position = length - count + (tl.minimum(first_row + rows, count * group) - 1) // group
    has_first: tl.constexpr = is_windowed or is_chunked
    lowest = first_key(first_position, left, chunk, is_windowed, is_chunked)
    highest_first = first_key(last_position, left, chunk, is_windowed, is_chunked)
    lowest_last = last_key(first_position, length, left, is_causal, is_windowed)
    last = last_key(position, length, left, is_causal, is_windowed)
    end = last_key(last_position, length, left, is_causal, is_windowed) + 1
    first = first_key(position, left, chunk, is_windowed, is_chunked)
    at = (start + token).to(tl.int64)
    if has_spans:
        first, last = with_spans(first, last, spans, at, row_mask, position, length)
        lowest, end = tl.min(tl.where(row_mask, first, length), 0), tl.max(tl.where(row_mask, last, -1), 0) + 1
        highest_first = tl.max(tl.where(row_mask, first, 0), 0)
        lowest_last = tl.min(tl.where(row_mask, last, length - 1), 0)
    num_keys = length
    if ranks > 1:
        lowest, end = held(lowest, rank, ranks, interleave), held(end, rank, ranks, interleave)
        has_keys = lowest < end  # slots outside of a window may hold anything, and are not loaded
        lowest, end = tl.where(has_keys, lowest, 0), tl.where(has_keys, end, 0)
        highest_first = tl.where(has_keys, held(highest_first, rank, ranks, interleave), 0)
        lowest_last = tl.where(has_keys, held(lowest_last + 1, rank, ranks, interleave), 0) - 1
        first, last = held(first, rank, ranks, interleave), held(last + 1, rank, ranks, interleave) - 1
        num_keys = held(length, rank, ranks, interleave)
    begin = lowest // keys * keys
    full = begin  # all rows attend to the keys from here to `diagonal`
    if has_first:
        full = (highest_first + keys - 1) // keys * keys
    diagonal = (lowest_last + 1) // keys * keys

    columns_v = tl.arange(0, width_v)
    q_at = query + at * q_token + head * q_head
    layer: tl.constexpr = query.dtype.element_ty
    element: tl.constexpr = key.dtype.element_ty
    has_codes: tl.constexpr = element.primitive_bitwidth == 8 and element != tl.int8 and not is_records
    q, q_latent, power = load_queries(q_at, row_mask, size, size_v, width, width_v, is_latent, has_codes)
    unscaled_bits: tl.constexpr = by_bits and not (is_records or is_by_token)
    k_scales, v_scales = k_scale + kv_head * k_scale_head, v_scale + kv_head * v_scale_head
    unit = scale * 1.4426950408889634 * load_scale(k_scale, kv_head, is_scaled, is_per_head, unscaled_bits)
    unit *= power
    slope = tl.zeros((rows,), tl.float32)
    if alibi > 0:
        slope = tl.load(slopes + head, mask=row_mask, other=0.0) * 1.4426950408889634
    mask_rows = rows_of_mask(mask, mask_starts, mask_stride, request, token, row_mask, length, has_mask)
    acc, row_max, row_sum = start_softmax(rows, width_v)
    key_base, value_base, pages = first_rows(
        key + kv_head * k_head, value + kv_head * v_head, table, request, table_stride, k_token, v_token, page_size
    )
    if has_first:
        acc, row_max, row_sum = attend(
            begin, full, lowest, end - 1, diagonal, q, q_latent, position, first, last, slope, mask_rows, acc, row_max,
            row_sum, key_base, value_base, pages, kv_head, k_page, k_token, v_page, v_token, 0, k_scales, v_scales,
            k_scale_page, v_scale_page, unit, soft_cap, layer, size, size_v, width, width_v, page_size, has_first,
            has_mask, is_capped, alibi, True, False, by_bits, is_latent, is_records, is_by_token, False, False, keys,  # noqa: FBT003
            stages, interpreted,
        )  # fmt: skip
    key_tiles, value_tiles = key_base, value_base
    if by_descriptor:
        key_tiles, value_tiles = key_pages, value_pages
    rest = diagonal
    if joins_diagonal:  # a tile with the last key of a request may hold anything behind it
        rest = tl.minimum(end + keys - 1, num_keys) // keys * keys
    rest = tl.maximum(full, rest)
    acc, row_max, row_sum = attend(
        full, rest, lowest, end - 1, diagonal, q, q_latent, position, first, last, slope, mask_rows, acc, row_max,
        row_sum, key_tiles, value_tiles, pages, kv_head, k_page, k_token, v_page, v_token, 0, k_scales, v_scales,
        k_scale_page, v_scale_page, unit, soft_cap, layer, size, size_v, width, width_v, page_size, has_first,
        has_mask, is_capped, alibi, has_mask, joins_diagonal, by_bits, is_latent, is_records, is_by_token, False,  # noqa: FBT003
        by_descriptor, keys, stages, interpreted,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        rest, end, lowest, end - 1, diagonal, q, q_latent, position, first, last, slope, mask_rows, acc, row_max,
        row_sum, key_base, value_base, pages, kv_head, k_page, k_token, v_page, v_token, 0, k_scales, v_scales,
        k_scale_page, v_scale_page, unit, soft_cap, layer, size, size_v, width, width_v, page_size, has_first,
        has_mask, is_capped, alibi, True, False, by_bits, is_latent, is_records, is_by_token, False, False, keys,  # noqa: FBT003
        stages, interpreted,
    )  # fmt: skip

    factor = load_scale(v_scale, kv_head, is_scaled, is_per_head, unscaled_bits)
    result, log2_lse = finish(acc, row_max, row_sum, factor, head, sinks, row_mask, True, has_sinks)  # noqa: FBT003
    out_at = out + at[:, None] * out_token + head[:, None] * size_v + columns_v[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=row_mask[:, None] & (columns_v < size_v)[None, :])
    if has_lse:
        tl.store(lse + at * lse_token + head * lse_head, log2_lse * 0.6931471805599453, mask=row_mask)
