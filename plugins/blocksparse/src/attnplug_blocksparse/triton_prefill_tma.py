"""The kernel for one prompt in one piece, whose keys are loaded by descriptors. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_blocksparse.triton_pattern import kinds_of, residue_of
from attnplug_blocksparse.triton_softmax import scores_of, take_in


@triton.jit(do_not_specialize=["length", "num_tiles", "supers", "first", "step"])
def _prompt(
    key: tl.tensor,
    value: tl.tensor,
    key_blocks: tl.tensor,
    value_blocks: tl.tensor,
    query: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_token: tl.int64,
    q_head: tl.int64,
    out_token: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    length: tl.int32,
    num_tiles: tl.int32,
    supers: tl.int32,
    scale: tl.float32,
    first: tl.int32,
    step: tl.int32,
    heads: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    local: tl.constexpr,
    stride: tl.constexpr,
    by_kv_head: tl.constexpr,
    has_lse: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """
    One program computes one head of one tile of rows, the last tiles first: those have most to do.

    Keys are seen in two ways: as ``(tokens, kv_heads, size)``, and as ``(supers, stride, block, kv_heads, size)`` where
    the vertical blocks of a head are neighbors, so that several are one load where tiles are larger than blocks. All
    but a tile or two at either end of what a tile of rows attends goes without a mask.
    """
    program = tl.program_id(0)
    head = program % heads
    kv_head = head // group
    place = (num_tiles - 1 - program // heads) * rows

    positions = place + tl.arange(0, rows)
    columns = tl.arange(0, size)
    mine = positions < length
    queries = query + positions.to(tl.int64)[:, None] * q_token + head * q_head + columns[None, :]
    q = tl.load(queries, mask=mine[:, None], other=0.0)

    residue = residue_of(head, kv_head, first, step, stride, by_kv_head)
    end = tl.minimum(place + rows, length)
    far, near, lowest = kinds_of(place, end, block, local)
    spread = (far + stride - 1 - residue) // stride
    at_once: tl.constexpr = keys // block
    near_tiles = ((lowest - near) * block) // keys

    factor = scale * 1.4426950408889634
    highest = tl.full((rows,), -1e30, tl.float32)  # finite: a row that has attended nothing yet shrinks by exp2(0)
    sums = tl.zeros((rows,), tl.float32)
    total = tl.zeros((rows, size), tl.float32)
    of_tile = tl.arange(0, keys)
    blocks = positions // block

    if keys <= block:  # one loop: each one more drains what is in flight
        parts: tl.constexpr = block // keys
        rest = 0
        far_tiles = spread * parts
        for index in tl.range(0, far_tiles + near_tiles, num_stages=stages):
            vertical = (index // parts * stride + residue) * block + index % parts * keys
            begin = tl.where(index < far_tiles, vertical, near * block + (index - far_tiles) * keys)
            k = key.load([begin, kv_head, 0]).reshape(keys, size)
            scores = scores_of(q, k, interpreted)
            v = value.load([begin, kv_head, 0]).reshape(keys, size)
            total, highest, sums = take_in(scores, v, total, highest, sums, factor, interpreted)
    else:
        whole = tl.minimum(spread, supers) // at_once
        rest = spread - whole * at_once
        for index in tl.range(0, whole, num_stages=stages):
            k = key_blocks.load([index * at_once, residue, 0, kv_head, 0]).reshape(keys, size)
            scores = scores_of(q, k, interpreted)
            v = value_blocks.load([index * at_once, residue, 0, kv_head, 0]).reshape(keys, size)
            total, highest, sums = take_in(scores, v, total, highest, sums, factor, interpreted)

        for index in tl.range(0, near_tiles, num_stages=stages):
            begin = near * block + index * keys
            k = key.load([begin, kv_head, 0]).reshape(keys, size)
            scores = scores_of(q, k, interpreted)
            v = value.load([begin, kv_head, 0]).reshape(keys, size)
            total, highest, sums = take_in(scores, v, total, highest, sums, factor, interpreted)

    # What is left needs masks: vertical blocks that fill no tile, each alone; what is local to some rows; the diagonal.
    edge_tiles = ((near - far) * block + keys - 1) // keys
    diagonal = near * block + near_tiles * keys
    diagonal_tiles = (tl.maximum(end - diagonal, 0) + keys - 1) // keys
    for index in tl.range(0, rest + edge_tiles + diagonal_tiles, num_stages=stages):
        at_edge = index < rest + edge_tiles
        begin = tl.where(
            index < rest,
            ((spread - rest + index) * stride + residue) * block,
            tl.where(at_edge, far * block + (index - rest) * keys, diagonal + (index - rest - edge_tiles) * keys),
        )
        stop = tl.where(index < rest, begin + block, tl.where(at_edge, near * block, end))
        k = key.load([begin, kv_head, 0]).reshape(keys, size)
        scores = scores_of(q, k, interpreted)
        tokens = begin + of_tile
        of_block = tokens // block
        is_local = (blocks[:, None] - of_block[None, :]) < local
        is_vertical = (of_block % stride) == residue
        seen = (tokens < stop)[None, :] & (tokens[None, :] <= positions[:, None]) & (is_local | is_vertical[None, :])
        v = value.load([begin, kv_head, 0]).reshape(keys, size)
        scores = tl.where(seen, scores, float("-inf"))
        total, highest, sums = take_in(scores, v, total, highest, sums, factor, interpreted)

    result = (total * tl.where(sums > 0, 1.0 / sums, 0.0)[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + positions.to(tl.int64)[:, None] * out_token + head * size + columns[None, :], result, mask=mine[:, None]
    )
    if has_lse:
        natural = (highest + tl.math.log2(sums)) * 0.6931471805599453
        natural = tl.where(sums > 0, natural, float("-inf"))
        tl.store(lse + positions.to(tl.int64) * lse_token + head * lse_head, natural, mask=mine)
