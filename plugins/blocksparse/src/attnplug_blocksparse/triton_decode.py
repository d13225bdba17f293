"""The kernels for one token per sequence: partial results, and their merge. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug_blocksparse.triton_pattern import residue_of
from attnplug_blocksparse.triton_softmax import scores_of, take_in


@triton.jit(do_not_specialize=["of_request", "num_reqs", "num_splits", "first", "step"])
def _decode(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    parts: tl.tensor,
    part_sums: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    residues: tl.tensor,
    before: tl.tensor,
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
    num_splits: tl.int32,
    scale: tl.float32,
    first: tl.int32,
    step: tl.int32,
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
    One program computes the query heads of one KV head over a share of the blocks that some of them attend.

    These blocks are numbered: vertical ones left of all local ones, then the local ones. Each is loaded once for the
    group; a head for which a block is neither leaves it out.
    """
    program = tl.program_id(0)
    kv_head = program % kv_heads
    request = (program // kv_heads) % num_reqs
    split = program // (kv_heads * num_reqs)
    start = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) == start:  # padding
        return

    length = tl.load(seq_lens + request)
    last = (length - 1) // block
    far = tl.minimum(tl.maximum(last - local + 1, 0), last)
    of_group = tl.load(before + kv_head * (stride + 1) + stride)
    spread = (far // stride) * of_group + tl.load(before + kv_head * (stride + 1) + far % stride)
    units = spread + last - far + 1
    share = (units + num_splits - 1) // num_splits
    begin = tl.minimum(split * share, units) * block
    end = tl.minimum((split + 1) * share, units) * block

    lane = tl.arange(0, lanes)
    head = kv_head * group + lane
    mine = lane < group
    residue = residue_of(head, kv_head, first, step, stride, by_kv_head)
    columns = tl.arange(0, width)
    inside = columns < size
    queries = query + start.to(tl.int64) * q_token + head[:, None] * q_head + columns[None, :]
    q = tl.load(queries, mask=mine[:, None] & inside[None, :], other=0.0)
    keys_at, values_at = key + kv_head * k_head, value + kv_head * v_head
    pages = table + request * of_request
    own = residues + kv_head * stride

    factor = scale * 1.4426950408889634
    if is_scaled:
        factor = factor * tl.load(k_scale)
    highest = tl.full((lanes,), -1e30, tl.float32)  # finite: a head that has attended nothing yet shrinks by exp2(0)
    sums = tl.zeros((lanes,), tl.float32)
    total = tl.zeros((lanes, width), tl.float32)
    of_tile = tl.arange(0, keys)

    for index in tl.range(begin, end, keys, num_stages=stages):
        # Where a tile is of one block, and of one page, one number of each is looked up for all of its tokens.
        if block % keys == 0:
            unit, inner = index // block, index % block + of_tile
        else:
            unit, inner = (index + of_tile) // block, (index + of_tile) % block
        vertical = (unit // of_group) * stride + tl.load(own + unit % of_group)
        blocks = tl.where(unit < spread, vertical, far + unit - spread)
        tokens = blocks * block + inner
        there = (index + of_tile < end) & (tokens < length)
        if block % keys == 0 and page_size % keys == 0:
            first_token = blocks * block + index % block
            if block != keys:  # a whole tile of the last block may be beyond the sequence, and beyond its pages
                first_token = tl.minimum(first_token, length - 1)
            found = tl.load(pages + first_token // page_size).to(tl.int64)
            places = first_token % page_size + of_tile
        else:
            found = tl.load(pages + tokens // page_size, mask=there, other=0).to(tl.int64)
            places = tokens % page_size
        wanted = there[:, None] & inside[None, :]
        k = tl.load(keys_at + (found * k_page + places * k_token)[:, None] + columns[None, :], mask=wanted, other=0.0)
        scores = scores_of(q, k, interpreted)
        of_block = tokens // block
        is_local = (last - of_block) < local
        of_heads = residue if by_kv_head else residue[:, None]  # one for the group, or one each
        is_vertical = (of_block % stride)[None, :] == of_heads
        seen = there[None, :] & (is_local[None, :] | is_vertical)
        scores = tl.where(seen, scores, float("-inf"))
        v = tl.load(values_at + (found * v_page + places * v_token)[:, None] + columns[None, :], mask=wanted, other=0.0)
        total, highest, sums = take_in(scores, v.to(q.dtype), total, highest, sums, factor, interpreted)

    weight = tl.where(sums > 0, 1.0 / sums, 0.0)
    if is_scaled:
        weight = weight * tl.load(v_scale)
    result = total * weight[:, None]
    logarithm = tl.where(sums > 0, highest + tl.math.log2(sums), float("-inf"))
    stored = mine[:, None] & inside[None, :]
    if is_split:
        row = (split * num_reqs + request).to(tl.int64) * (kv_heads * group) + head
        tl.store(parts + row[:, None] * size + columns[None, :], result, mask=stored)
        tl.store(part_sums + row, logarithm, mask=mine)
    else:
        places = out + start.to(tl.int64) * out_token + head[:, None] * size + columns[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=stored)
        if has_lse:
            sums_at = lse + start.to(tl.int64) * lse_token + head * lse_head
            tl.store(sums_at, logarithm * 0.6931471805599453, mask=mine)


@triton.jit(do_not_specialize=["num_reqs", "num_splits"])
def _merge(
    parts: tl.tensor,
    part_sums: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_starts: tl.tensor,
    out_token: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    num_reqs: tl.int32,
    num_splits: tl.int32,
    heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    has_lse: tl.constexpr,
    most: tl.constexpr,
) -> None:
    """One program merges the splits of one head of one request."""
    head = tl.program_id(0) % heads
    request = tl.program_id(0) // heads
    start = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) == start:  # padding
        return

    split = tl.arange(0, most)
    columns = tl.arange(0, width)
    there = split < num_splits
    row = (split * num_reqs + request).to(tl.int64) * heads + head
    logarithms = tl.load(part_sums + row, mask=there, other=float("-inf"))
    highest = tl.max(logarithms, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.math.exp2(logarithms - shift)
    sums = tl.sum(weights, 0)
    found = tl.load(
        parts + row[:, None] * size + columns[None, :],
        mask=(weights > 0)[:, None] & (columns < size)[None, :],
        other=0.0,
    )
    total = tl.sum(found * weights[:, None], 0)
    result = tl.where(sums > 0, total / sums, 0.0)
    places = out + start.to(tl.int64) * out_token + head * size + columns
    tl.store(places, result.to(out.dtype.element_ty), mask=columns < size)
    if has_lse:
        natural = (shift + tl.math.log2(sums)) * 0.6931471805599453
        tl.store(lse + start.to(tl.int64) * lse_token + head * lse_head, tl.where(sums > 0, natural, float("-inf")))
