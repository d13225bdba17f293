"""The kernel of decodes, one token per sequence, with split KV. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_blocksparse.triton_ops import qk_dot, residue_of, softmax_step


@triton.jit(do_not_specialize=["table_stride", "num_reqs", "num_splits", "first_head", "slide"])
def _decode(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    parts: tl.tensor,
    part_lse: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    residues: tl.tensor,
    residues_below: tl.tensor,
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
    num_splits: tl.int32,
    scale: tl.float32,
    first_head: tl.int32,
    slide: tl.int32,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    lanes: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    local: tl.constexpr,
    stride: tl.constexpr,
    by_kv_head: tl.constexpr,
    is_scaled: tl.constexpr,
    is_split: tl.constexpr,
    has_lse: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """
    One program computes the query heads of one KV head, over a split of the blocks that any of them attends to.

    These blocks are numbered: vertical blocks before the local ones, then the local ones. Each is loaded once for the
    group, and masked for heads that do not attend to it.
    """
    program = tl.program_id(0)
    kv_head = program % kv_heads
    request = (program // kv_heads) % num_reqs
    split = program // (kv_heads * num_reqs)
    start = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) == start:  # padding
        return

    length = tl.load(seq_lens + request)
    last_block = (length - 1) // block
    some_local = tl.minimum(tl.maximum(last_block - local + 1, 0), last_block)
    group_residues = tl.load(residues_below + kv_head * (stride + 1) + stride)
    num_vertical = (some_local // stride) * group_residues + tl.load(
        residues_below + kv_head * (stride + 1) + some_local % stride
    )
    num_blocks = num_vertical + last_block - some_local + 1
    blocks_per_split = (num_blocks + num_splits - 1) // num_splits
    begin = tl.minimum(split * blocks_per_split, num_blocks) * block
    end = tl.minimum((split + 1) * blocks_per_split, num_blocks) * block

    lane = tl.arange(0, lanes)
    head = kv_head * group + lane
    row_mask = lane < group
    residue = residue_of(head, kv_head, first_head, slide, stride, by_kv_head)
    columns = tl.arange(0, width)
    column_mask = columns < size
    query_ptrs = query + start.to(tl.int64) * q_token + head[:, None] * q_head + columns[None, :]
    q = tl.load(query_ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    key_base, value_base = key + kv_head * k_head, value + kv_head * v_head
    page_ptrs = table + request * table_stride
    residue_ptrs = residues + kv_head * stride

    log2_scale = scale * 1.4426950408889634
    if is_scaled:
        log2_scale = log2_scale * tl.load(k_scale)
    row_max = tl.full((lanes,), -1e30, tl.float32)  # finite: see softmax_step
    row_sum = tl.zeros((lanes,), tl.float32)
    acc = tl.zeros((lanes, width), tl.float32)
    key_offsets = tl.arange(0, keys)

    for index in tl.range(begin, end, keys, num_stages=stages):
        # A tile inside one block looks up one residue, and a tile inside one page looks up one page.
        if block % keys == 0:
            ordinal, offset = index // block, index % block + key_offsets
        else:
            ordinal, offset = (index + key_offsets) // block, (index + key_offsets) % block
        vertical = (ordinal // group_residues) * stride + tl.load(residue_ptrs + ordinal % group_residues)
        blocks = tl.where(ordinal < num_vertical, vertical, some_local + ordinal - num_vertical)
        tokens = blocks * block + offset
        key_mask = (index + key_offsets < end) & (tokens < length)
        if block % keys == 0 and page_size % keys == 0:
            first_token = blocks * block + index % block
            if block != keys:  # a tile of the last block may be beyond the sequence, and its pages
                first_token = tl.minimum(first_token, length - 1)
            page = tl.load(page_ptrs + first_token // page_size).to(tl.int64)
            slots = first_token % page_size + key_offsets
        else:
            page = tl.load(page_ptrs + tokens // page_size, mask=key_mask, other=0).to(tl.int64)
            slots = tokens % page_size
        tile_mask = key_mask[:, None] & column_mask[None, :]
        k = tl.load(key_base + (page * k_page + slots * k_token)[:, None] + columns[None, :], mask=tile_mask, other=0.0)
        scores = qk_dot(q, k, interpreted)
        block_of_key = tokens // block
        is_local = (last_block - block_of_key) < local
        head_residues = residue if by_kv_head else residue[:, None]  # one for the group, or one per head
        is_vertical = (block_of_key % stride)[None, :] == head_residues
        visible = key_mask[None, :] & (is_local[None, :] | is_vertical)
        scores = tl.where(visible, scores, float("-inf"))
        v = tl.load(
            value_base + (page * v_page + slots * v_token)[:, None] + columns[None, :], mask=tile_mask, other=0.0
        )
        acc, row_max, row_sum = softmax_step(scores, v.to(q.dtype), acc, row_max, row_sum, log2_scale, interpreted)

    inverse = tl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    if is_scaled:
        inverse = inverse * tl.load(v_scale)
    result = acc * inverse[:, None]
    log2_lse = tl.where(row_sum > 0, row_max + tl.math.log2(row_sum), float("-inf"))
    store_mask = row_mask[:, None] & column_mask[None, :]
    if is_split:
        at = (start.to(tl.int64) * (kv_heads * group) + head) * num_splits + split
        tl.store(parts + at[:, None] * size + columns[None, :], result, mask=store_mask)
        tl.store(part_lse + at, log2_lse, mask=row_mask)
    else:
        out_ptrs = out + start.to(tl.int64) * out_token + head[:, None] * size + columns[None, :]
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=store_mask)
        if has_lse:
            lse_ptrs = lse + start.to(tl.int64) * lse_token + head * lse_head
            tl.store(lse_ptrs, log2_lse * 0.6931471805599453, mask=row_mask)
