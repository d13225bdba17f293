"""The kernel of prefills with pointer loads, for all requests of a step, contiguous or paged K/V. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_blocksparse.triton_ops import block_bounds, qk_dot, residue_of, softmax_step


@triton.jit
def _vertical_token(ordinal: tl.tensor, residue: tl.tensor, block: tl.constexpr, stride: tl.constexpr) -> tl.tensor:
    """Return the token of an ordinal among the tokens of a head's vertical blocks."""
    return ((ordinal // block) * stride + residue) * block + ordinal % block


@triton.jit
def _row_ptrs(
    base: tl.tensor,
    tokens: tl.tensor,
    pages: tl.tensor,
    page_stride: tl.int64,
    token_stride: tl.int64,
    columns: tl.tensor,
    page_size: tl.constexpr,
) -> tl.tensor:
    """Return pointers to rows of K or V; `pages` is the physical page of each token, unused for contiguous K/V."""
    if page_size:
        offsets = pages.to(tl.int64) * page_stride + (tokens % page_size) * token_stride
    else:
        offsets = tokens.to(tl.int64) * token_stride
    return base + offsets[:, None] + columns[None, :]


@triton.jit
def _load_rows(rows: tl.tensor, column_mask: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """Load rows without a row mask; columns beyond the head size are 0."""
    return tl.load(rows) if size == width else tl.load(rows, mask=column_mask[None, :], other=0.0)


@triton.jit(do_not_specialize=["table_stride", "num_reqs", "num_tiles", "first_head", "slide"])
def _prefill(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_starts: tl.tensor,
    key_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
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
    table_stride: tl.int64,
    num_reqs: tl.int32,
    num_tiles: tl.int32,
    scale: tl.float32,
    first_head: tl.int32,
    slide: tl.int32,
    heads: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    local: tl.constexpr,
    stride: tl.constexpr,
    by_kv_head: tl.constexpr,
    is_scaled: tl.constexpr,
    has_lse: tl.constexpr,
    is_wide: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """
    One program computes one head of one tile of rows.

    Tiles are aligned in the sequence. The last ones are launched first, since they have the most keys. Tokens that
    every row of a tile attends to need no mask: vertical blocks before the local ones, and blocks local to all rows.
    Only the tiles at both ends are masked.
    """
    program = tl.program_id(0)
    head = program % heads
    request = (program // heads) % num_reqs
    tile = num_tiles - 1 - program // (heads * num_reqs)
    kv_head = head // group

    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    length = tl.load(seq_lens + request)
    context = length - count
    tile_begin = context - context % rows + tile * rows
    if (tile_begin >= length) | (count == 0):
        return

    lanes = tl.arange(0, rows)
    columns = tl.arange(0, width)
    positions = tile_begin + lanes
    row_mask = (positions >= context) & (positions < length)
    row = start + positions - context
    column_mask = columns < size
    query_ptrs = query + row.to(tl.int64)[:, None] * q_token + head * q_head + columns[None, :]
    q = tl.load(query_ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0)

    if page_size:
        key_base, value_base = key + kv_head * k_head, value + kv_head * v_head
    else:
        key_start = tl.load(key_starts + request).to(tl.int64)
        key_base = key + key_start * k_token + kv_head * k_head
        value_base = value + key_start * v_token + kv_head * v_head
    pages = table + request * table_stride

    residue = residue_of(head, kv_head, first_head, slide, stride, by_kv_head)
    end = tl.minimum(tile_begin + rows, length)
    some_local, all_local, diagonal_block = block_bounds(tile_begin, end, block, local)
    vertical_tokens = ((some_local + stride - 1 - residue) // stride) * block
    vertical_tiles = vertical_tokens // keys
    local_tiles = ((diagonal_block - all_local) * block) // keys

    log2_scale = scale * 1.4426950408889634
    if is_scaled:
        log2_scale = log2_scale * tl.load(k_scale)
    row_max = tl.full((rows,), -1e30, tl.float32)  # finite: see softmax_step
    row_sum = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, width), tl.float32)
    key_offsets = tl.arange(0, keys)

    for index in tl.range(0, vertical_tiles + local_tiles, num_stages=stages):
        if keys % block == 0:  # tiles of whole blocks: one address formula for vertical and local tiles
            is_vertical_tile = index < vertical_tiles
            begin = tl.where(
                is_vertical_tile,
                (index * (keys // block) * stride + residue) * block,
                all_local * block + (index - vertical_tiles) * keys,
            )
            block_stride = tl.where(is_vertical_tile, stride * block, block)
            if page_size:
                tokens = begin + (key_offsets // block) * block_stride + key_offsets % block
                page = tl.load(pages + tokens // page_size)
                k_rows = _row_ptrs(key_base, tokens, page, k_page, k_token, columns, page_size)
                v_rows = _row_ptrs(value_base, tokens, page, v_page, v_token, columns, page_size)
            else:
                offsets = (key_offsets // block) * block_stride + key_offsets % block
                k_rows = (key_base + begin.to(tl.int64) * k_token) + (
                    (offsets * (k_token if is_wide else k_token.to(tl.int32)))[:, None] + columns[None, :]
                )
                v_rows = (value_base + begin.to(tl.int64) * v_token) + (
                    (offsets * (v_token if is_wide else v_token.to(tl.int32)))[:, None] + columns[None, :]
                )
        else:
            tokens = tl.where(
                index < vertical_tiles,
                _vertical_token(index * keys + key_offsets, residue, block, stride),
                all_local * block + (index - vertical_tiles) * keys + key_offsets,
            )
            page = tl.load(pages + tokens // page_size) if page_size else tokens
            k_rows = _row_ptrs(key_base, tokens, page, k_page, k_token, columns, page_size)
            v_rows = _row_ptrs(value_base, tokens, page, v_page, v_token, columns, page_size)
        k = _load_rows(k_rows, column_mask, size, width)
        scores = qk_dot(q, k, interpreted)
        v = _load_rows(v_rows, column_mask, size, width)
        acc, row_max, row_sum = softmax_step(scores, v.to(q.dtype), acc, row_max, row_sum, log2_scale, interpreted)

    # With masks: the remaining vertical tokens together with blocks local to some rows, then the diagonal.
    rest = vertical_tokens - vertical_tiles * keys
    edge = rest + (all_local - some_local) * block
    edge_tiles = (edge + keys - 1) // keys
    diagonal = all_local * block + local_tiles * keys
    diagonal_tiles = (tl.maximum(end - diagonal, 0) + keys - 1) // keys
    block_of_row = positions // block
    for index in tl.range(0, edge_tiles + diagonal_tiles, num_stages=1):
        ordinal = index * keys + key_offsets
        is_edge = index < edge_tiles
        tokens = tl.where(
            is_edge,
            tl.where(
                ordinal < rest,
                _vertical_token(vertical_tiles * keys + ordinal, residue, block, stride),
                some_local * block + ordinal - rest,
            ),
            diagonal + ordinal - edge_tiles * keys,
        )
        key_mask = tl.where(is_edge, ordinal < edge, tokens < end)
        tokens = tl.where(key_mask, tokens, 0)
        page = tl.load(pages + tokens // page_size, mask=key_mask, other=0) if page_size else tokens
        k_rows = _row_ptrs(key_base, tokens, page, k_page, k_token, columns, page_size)
        v_rows = _row_ptrs(value_base, tokens, page, v_page, v_token, columns, page_size)
        k = tl.load(k_rows, mask=key_mask[:, None] & column_mask[None, :], other=0.0)
        scores = qk_dot(q, k, interpreted)
        block_of_key = tokens // block
        is_local = (block_of_row[:, None] - block_of_key[None, :]) < local
        is_vertical = (block_of_key % stride) == residue
        visible = key_mask[None, :] & (tokens[None, :] <= positions[:, None]) & (is_local | is_vertical[None, :])
        v = tl.load(v_rows, mask=key_mask[:, None] & column_mask[None, :], other=0.0)
        scores = tl.where(visible, scores, float("-inf"))
        acc, row_max, row_sum = softmax_step(scores, v.to(q.dtype), acc, row_max, row_sum, log2_scale, interpreted)

    inverse = tl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    if is_scaled:
        inverse = inverse * tl.load(v_scale)
    result = (acc * inverse[:, None]).to(out.dtype.element_ty)
    out_ptrs = out + row.to(tl.int64)[:, None] * out_token + head * size + columns[None, :]
    tl.store(out_ptrs, result, mask=row_mask[:, None] & column_mask[None, :])
    if has_lse:
        natural_lse = (row_max + tl.math.log2(row_sum)) * 0.6931471805599453
        natural_lse = tl.where(row_sum > 0, natural_lse, float("-inf"))
        tl.store(lse + row.to(tl.int64) * lse_token + head * lse_head, natural_lse, mask=row_mask)
