"""The kernel for prompts and their chunks. Imported only where Triton is: it is compiled, or interpreted."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_blocksparse.triton_pattern import kinds_of, residue_of
from attnplug_blocksparse.triton_softmax import scores_of, take_in


@triton.jit
def _vertical(counted: tl.tensor, residue: tl.tensor, block: tl.constexpr, stride: tl.constexpr) -> tl.tensor:
    """The tokens of the vertical blocks of a head, counted one block after another."""
    return ((counted // block) * stride + residue) * block + counted % block


@triton.jit
def _rows(
    base: tl.tensor,
    tokens: tl.tensor,
    pages: tl.tensor,
    of_page: tl.int64,
    of_token: tl.int64,
    columns: tl.tensor,
    page_size: tl.constexpr,
) -> tl.tensor:
    """The addresses of rows; `pages` is the physical page of each, and read only where there are pages."""
    if page_size:
        places = pages.to(tl.int64) * of_page + (tokens % page_size) * of_token
    else:
        places = tokens.to(tl.int64) * of_token
    return base + places[:, None] + columns[None, :]


@triton.jit
def _load(rows: tl.tensor, inside: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> tl.tensor:
    """Rows that are all there; columns beyond the head are 0."""
    return tl.load(rows) if size == width else tl.load(rows, mask=inside[None, :], other=0.0)


@triton.jit(do_not_specialize=["of_request", "num_reqs", "num_tiles", "first", "step"])
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
    of_request: tl.int64,
    num_reqs: tl.int32,
    num_tiles: tl.int32,
    scale: tl.float32,
    first: tl.int32,
    step: tl.int32,
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

    Tiles begin at multiples of `rows` in the sequence, the last ones first: those have most to do. The tokens that
    every row of a tile attends, vertical blocks left of all local ones and the local ones that all rows have, go
    without a mask; what is left is a tile or two at either end.
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
    place = context - context % rows + tile * rows
    if (place >= length) | (count == 0):
        return

    lanes = tl.arange(0, rows)
    columns = tl.arange(0, width)
    positions = place + lanes
    mine = (positions >= context) & (positions < length)
    row = start + positions - context
    inside = columns < size
    queries = query + row.to(tl.int64)[:, None] * q_token + head * q_head + columns[None, :]
    q = tl.load(queries, mask=mine[:, None] & inside[None, :], other=0.0)

    if page_size:
        keys_at, values_at = key + kv_head * k_head, value + kv_head * v_head
    else:
        key_start = tl.load(key_starts + request).to(tl.int64)
        keys_at = key + key_start * k_token + kv_head * k_head
        values_at = value + key_start * v_token + kv_head * v_head
    pages = table + request * of_request

    residue = residue_of(head, kv_head, first, step, stride, by_kv_head)
    end = tl.minimum(place + rows, length)
    far, near, lowest = kinds_of(place, end, block, local)
    spread = ((far + stride - 1 - residue) // stride) * block
    spread_tiles = spread // keys
    near_tiles = ((lowest - near) * block) // keys

    factor = scale * 1.4426950408889634
    if is_scaled:
        factor = factor * tl.load(k_scale)
    highest = tl.full((rows,), -1e30, tl.float32)  # finite: a row that has attended nothing yet shrinks by exp2(0)
    sums = tl.zeros((rows,), tl.float32)
    total = tl.zeros((rows, width), tl.float32)
    of_tile = tl.arange(0, keys)

    for index in tl.range(0, spread_tiles + near_tiles, num_stages=stages):
        if keys % block == 0:  # one multiplication for both kinds
            is_spread = index < spread_tiles
            begin = tl.where(
                is_spread,
                (index * (keys // block) * stride + residue) * block,
                near * block + (index - spread_tiles) * keys,
            )
            apart = tl.where(is_spread, stride * block, block)
            if page_size:
                tokens = begin + (of_tile // block) * apart + of_tile % block
                found = tl.load(pages + tokens // page_size)
                k_rows = _rows(keys_at, tokens, found, k_page, k_token, columns, page_size)
                v_rows = _rows(values_at, tokens, found, v_page, v_token, columns, page_size)
            else:
                offsets = (of_tile // block) * apart + of_tile % block
                k_rows = (keys_at + begin.to(tl.int64) * k_token) + (
                    (offsets * (k_token if is_wide else k_token.to(tl.int32)))[:, None] + columns[None, :]
                )
                v_rows = (values_at + begin.to(tl.int64) * v_token) + (
                    (offsets * (v_token if is_wide else v_token.to(tl.int32)))[:, None] + columns[None, :]
                )
        else:
            tokens = tl.where(
                index < spread_tiles,
                _vertical(index * keys + of_tile, residue, block, stride),
                near * block + (index - spread_tiles) * keys + of_tile,
            )
            found = tl.load(pages + tokens // page_size) if page_size else tokens
            k_rows = _rows(keys_at, tokens, found, k_page, k_token, columns, page_size)
            v_rows = _rows(values_at, tokens, found, v_page, v_token, columns, page_size)
        k = _load(k_rows, inside, size, width)
        scores = scores_of(q, k, interpreted)
        v = _load(v_rows, inside, size, width)
        total, highest, sums = take_in(scores, v.to(q.dtype), total, highest, sums, factor, interpreted)

    # The rest of the vertical tokens and what is local to some rows together, then the diagonal.
    rest = spread - spread_tiles * keys
    edge = rest + (near - far) * block
    edge_tiles = (edge + keys - 1) // keys
    diagonal = near * block + near_tiles * keys
    diagonal_tiles = (tl.maximum(end - diagonal, 0) + keys - 1) // keys
    blocks = positions // block
    for index in tl.range(0, edge_tiles + diagonal_tiles, num_stages=1):
        counted = index * keys + of_tile
        at_edge = index < edge_tiles
        tokens = tl.where(
            at_edge,
            tl.where(
                counted < rest,
                _vertical(spread_tiles * keys + counted, residue, block, stride),
                far * block + counted - rest,
            ),
            diagonal + counted - edge_tiles * keys,
        )
        there = tl.where(at_edge, counted < edge, tokens < end)
        tokens = tl.where(there, tokens, 0)
        found = tl.load(pages + tokens // page_size, mask=there, other=0) if page_size else tokens
        k_rows = _rows(keys_at, tokens, found, k_page, k_token, columns, page_size)
        v_rows = _rows(values_at, tokens, found, v_page, v_token, columns, page_size)
        k = tl.load(k_rows, mask=there[:, None] & inside[None, :], other=0.0)
        scores = scores_of(q, k, interpreted)
        of_block = tokens // block
        is_local = (blocks[:, None] - of_block[None, :]) < local
        is_vertical = (of_block % stride) == residue
        seen = there[None, :] & (tokens[None, :] <= positions[:, None]) & (is_local | is_vertical[None, :])
        v = tl.load(v_rows, mask=there[:, None] & inside[None, :], other=0.0)
        scores = tl.where(seen, scores, float("-inf"))
        total, highest, sums = take_in(scores, v.to(q.dtype), total, highest, sums, factor, interpreted)

    weight = tl.where(sums > 0, 1.0 / sums, 0.0)
    if is_scaled:
        weight = weight * tl.load(v_scale)
    result = (total * weight[:, None]).to(out.dtype.element_ty)
    places = out + row.to(tl.int64)[:, None] * out_token + head * size + columns[None, :]
    tl.store(places, result, mask=mine[:, None] & inside[None, :])
    if has_lse:
        natural = (highest + tl.math.log2(sums)) * 0.6931471805599453
        natural = tl.where(sums > 0, natural, float("-inf"))
        tl.store(lse + row.to(tl.int64) * lse_token + head * lse_head, natural, mask=mine)
