"""The kernel of short queries, with split KV. Imports Triton."""

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


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "num_reqs",
        "mask_stride",
        "rank",
        "left",
        "chunk",
        "num_splits",
        "num_tokens",
        "num_slots",
    ]
)
def _decode(  # noqa: C901, PLR0912 - forms of one kernel, chosen at compile time
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
    parts: tl.tensor,
    part_lse: tl.tensor,
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
    num_splits: tl.int32,
    num_tokens: tl.int32,
    num_slots: tl.int32,
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
    is_split: tl.constexpr,
    topk: tl.constexpr,
    has_lens: tl.constexpr,
    by_descriptor: tl.constexpr,
) -> None:
    """
    One program computes a split of the keys of one KV head, for rows of one request.

    Rows are the query heads of the KV head for all new tokens. Requests with more than `short` are not computed here.

    With `ranks` the keys are those of a rank of decode context parallelism, and `seq_lens` those of whole requests.

    With `topk` each token is a request, whose keys are in the slots of its row of `table`: as many as `seq_lens` has,
    or `topk` without `has_lens`.

    With `by_descriptor`, `key_pages` and `value_pages` are tensor descriptors of `key` and `value`: they load the tiles
    that all rows attend to. Windows, chunks, spans, custom masks and `ranks` are not there then.
    """
    program = tl.program_id(0)
    kv_head = program % kv_heads
    requests = num_tokens if topk > 0 else num_reqs
    request = (program // kv_heads) % requests
    split = (program // (kv_heads * requests)) % num_splits
    first_row = (program // (kv_heads * requests)) // num_splits * rows
    if topk > 0:
        start = request
        count = tl.where(request < tl.load(query_starts + num_reqs), 1, 0)
    else:
        start = tl.load(query_starts + request)
        count = tl.load(query_starts + request + 1) - start
    if (count > short) | (first_row >= count * group):
        return

    if topk == 0:
        length = tl.load(seq_lens + request)
    elif has_lens:
        length = tl.minimum(tl.maximum(tl.load(seq_lens + request), 0), topk)
    else:
        length = tl.full((), topk, tl.int32)
    row = first_row + tl.arange(0, rows)
    row_mask = row < count * group
    token, head = row // group, kv_head * group + row % group
    position = length - count + token
    lowest = first_key(length - count + first_row // group, left, chunk, is_windowed, is_chunked)
    last_position = length - count + (tl.minimum(first_row + rows, count * group) - 1) // group
    end = last_key(last_position, length, left, is_causal, is_windowed) + 1
    first = first_key(position, left, chunk, is_windowed, is_chunked)
    last = last_key(position, length, left, is_causal, is_windowed)
    at = (start + token).to(tl.int64)
    if has_spans:
        first, last = with_spans(first, last, spans, at, row_mask, position, length)
        lowest, end = tl.min(tl.where(row_mask, first, length), 0), tl.max(tl.where(row_mask, last, -1), 0) + 1
    if ranks > 1:
        lowest, end = held(lowest, rank, ranks, interleave), held(end, rank, ranks, interleave)
        end = tl.where(lowest < end, end, 0)  # slots outside of a window may hold anything, and are not loaded
        lowest = tl.minimum(lowest, end)
        first, last = held(first, rank, ranks, interleave), held(last + 1, rank, ranks, interleave) - 1
    begin = lowest // keys * keys
    tiles = (end - begin + keys - 1) // keys
    span = (tiles + num_splits - 1) // num_splits * keys
    begin += split * span
    end = tl.minimum(begin + span, end)
    last = tl.minimum(last, end - 1)

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
    if by_descriptor:
        lowest_last = last_key(length - count + first_row // group, length, left, is_causal, is_windowed)
        whole = tl.maximum(begin, tl.minimum(lowest_last + 1, end) // keys * keys)
        acc, row_max, row_sum = attend(
            begin, whole, lowest, end - 1, whole, q, q_latent, position, first, last, slope, mask_rows, acc, row_max,
            row_sum, key_pages, value_pages, pages, kv_head, k_page, k_token, v_page, v_token, num_slots, k_scales,
            v_scales, k_scale_page, v_scale_page, unit, soft_cap, layer, size, size_v, width, width_v, page_size,
            False, False, is_capped, alibi, False, False, by_bits, is_latent, is_records, is_by_token, False, True,  # noqa: FBT003
            keys, stages, interpreted,
        )  # fmt: skip
        begin = whole
    acc, row_max, row_sum = attend(
        begin, end, lowest, end - 1, begin, q, q_latent, position, first, last, slope, mask_rows, acc, row_max,
        row_sum, key_base, value_base, pages, kv_head, k_page, k_token, v_page, v_token, num_slots, k_scales, v_scales,
        k_scale_page, v_scale_page, unit, soft_cap, layer, size, size_v, width, width_v, page_size,
        is_windowed or is_chunked, has_mask, is_capped, alibi, True, False, by_bits, is_latent, is_records,  # noqa: FBT003
        is_by_token, topk > 0, False, keys, stages, interpreted,  # noqa: FBT003
    )  # fmt: skip

    factor = load_scale(v_scale, kv_head, is_scaled, is_per_head, unscaled_bits)
    result, log2_lse = finish(acc, row_max, row_sum, factor, head, sinks, row_mask, split == 0, has_sinks)
    mask = row_mask[:, None] & (columns_v < size_v)[None, :]
    if is_split:
        part = ((request * short + token).to(tl.int64) * (kv_heads * group) + head) * num_splits + split
        tl.store(parts + part[:, None] * size_v + columns_v[None, :], result, mask=mask)
        tl.store(part_lse + part, log2_lse, mask=row_mask)
    else:
        out_at = out + at[:, None] * out_token + head[:, None] * size_v + columns_v[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=mask)
        if has_lse:
            tl.store(lse + at * lse_token + head * lse_head, log2_lse * 0.6931471805599453, mask=row_mask)
