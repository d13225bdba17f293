"""The kernel of a prefill of one request with contiguous K/V, loaded through TMA descriptors. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_blocksparse.triton_ops import block_bounds, qk_dot, residue_of, softmax_step


@triton.jit(do_not_specialize=["length", "num_tiles", "rounds", "first_head", "slide"])
def _prefill_tma(
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
    rounds: tl.int32,
    scale: tl.float32,
    first_head: tl.int32,
    slide: tl.int32,
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
    One program computes one head of one tile of rows. The last tiles are launched first: they have the most keys.

    Keys have two descriptors: ``(tokens, kv_heads, size)``, and ``(rounds, stride, block, kv_heads, size)``, where the
    vertical blocks of a head are neighbors, so that one load takes several where tiles are larger than blocks. Only
    the tiles at both ends of the keys of a tile of rows are masked.
    """
    program = tl.program_id(0)
    head = program % heads
    kv_head = head // group
    tile_begin = (num_tiles - 1 - program // heads) * rows

    positions = tile_begin + tl.arange(0, rows)
    columns = tl.arange(0, size)
    row_mask = positions < length
    query_ptrs = query + positions.to(tl.int64)[:, None] * q_token + head * q_head + columns[None, :]
    q = tl.load(query_ptrs, mask=row_mask[:, None], other=0.0)

    residue = residue_of(head, kv_head, first_head, slide, stride, by_kv_head)
    end = tl.minimum(tile_begin + rows, length)
    some_local, all_local, diagonal_block = block_bounds(tile_begin, end, block, local)
    num_vertical = (some_local + stride - 1 - residue) // stride
    blocks_per_tile: tl.constexpr = keys // block
    local_tiles = ((diagonal_block - all_local) * block) // keys

    log2_scale = scale * 1.4426950408889634
    row_max = tl.full((rows,), -1e30, tl.float32)  # finite: see softmax_step
    row_sum = tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, size), tl.float32)
    key_offsets = tl.arange(0, keys)
    block_of_row = positions // block

    if keys <= block:  # one loop: a second one would drain the pipeline between them
        tiles_per_block: tl.constexpr = block // keys
        rest = 0
        vertical_tiles = num_vertical * tiles_per_block
        for index in tl.range(0, vertical_tiles + local_tiles, num_stages=stages):
            vertical = (index // tiles_per_block * stride + residue) * block + index % tiles_per_block * keys
            begin = tl.where(index < vertical_tiles, vertical, all_local * block + (index - vertical_tiles) * keys)
            k = key.load([begin, kv_head, 0]).reshape(keys, size)
            scores = qk_dot(q, k, interpreted)
            v = value.load([begin, kv_head, 0]).reshape(keys, size)
            acc, row_max, row_sum = softmax_step(scores, v, acc, row_max, row_sum, log2_scale, interpreted)
    else:
        whole_tiles = tl.minimum(num_vertical, rounds) // blocks_per_tile
        rest = num_vertical - whole_tiles * blocks_per_tile
        for index in tl.range(0, whole_tiles, num_stages=stages):
            k = key_blocks.load([index * blocks_per_tile, residue, 0, kv_head, 0]).reshape(keys, size)
            scores = qk_dot(q, k, interpreted)
            v = value_blocks.load([index * blocks_per_tile, residue, 0, kv_head, 0]).reshape(keys, size)
            acc, row_max, row_sum = softmax_step(scores, v, acc, row_max, row_sum, log2_scale, interpreted)

        for index in tl.range(0, local_tiles, num_stages=stages):
            begin = all_local * block + index * keys
            k = key.load([begin, kv_head, 0]).reshape(keys, size)
            scores = qk_dot(q, k, interpreted)
            v = value.load([begin, kv_head, 0]).reshape(keys, size)
            acc, row_max, row_sum = softmax_step(scores, v, acc, row_max, row_sum, log2_scale, interpreted)

    # With masks: vertical blocks that fill no tile, each alone; blocks local to some rows; the diagonal.
    edge_tiles = ((all_local - some_local) * block + keys - 1) // keys
    diagonal = all_local * block + local_tiles * keys
    diagonal_tiles = (tl.maximum(end - diagonal, 0) + keys - 1) // keys
    for index in tl.range(0, rest + edge_tiles + diagonal_tiles, num_stages=stages):
        is_edge = index < rest + edge_tiles
        begin = tl.where(
            index < rest,
            ((num_vertical - rest + index) * stride + residue) * block,
            tl.where(
                is_edge, some_local * block + (index - rest) * keys, diagonal + (index - rest - edge_tiles) * keys
            ),
        )
        tile_end = tl.where(index < rest, begin + block, tl.where(is_edge, all_local * block, end))
        k = key.load([begin, kv_head, 0]).reshape(keys, size)
        scores = qk_dot(q, k, interpreted)
        tokens = begin + key_offsets
        block_of_key = tokens // block
        is_local = (block_of_row[:, None] - block_of_key[None, :]) < local
        is_vertical = (block_of_key % stride) == residue
        visible = (
            (tokens < tile_end)[None, :] & (tokens[None, :] <= positions[:, None]) & (is_local | is_vertical[None, :])
        )
        v = value.load([begin, kv_head, 0]).reshape(keys, size)
        scores = tl.where(visible, scores, float("-inf"))
        acc, row_max, row_sum = softmax_step(scores, v, acc, row_max, row_sum, log2_scale, interpreted)

    result = (acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + positions.to(tl.int64)[:, None] * out_token + head * size + columns[None, :],
        result,
        mask=row_mask[:, None],
    )
    if has_lse:
        natural_lse = (row_max + tl.math.log2(row_sum)) * 0.6931471805599453
        natural_lse = tl.where(row_sum > 0, natural_lse, float("-inf"))
        tl.store(lse + positions.to(tl.int64) * lse_token + head * lse_head, natural_lse, mask=row_mask)
