"""
The warp-specialized kernel of a prefill of one request, for compute capability 9.0. Imports Triton's Gluon.

One warp loads tiles of keys and values into a pipeline of stages in shared memory. Two warpgroups compute 64 query rows
each, consecutive in the sequence, from the same tiles: vertical blocks do not depend on the query, so each is loaded
once for 128 rows.

Both warpgroups see the tiles in one order:

- tiles that are local to both, backwards from the diagonal of the second warpgroup, which the first skips;
- vertical tiles, which both attend to;
- tiles of a block that is local to the first warpgroup only; the second skips them unless they are vertical.

So each warpgroup attends to one contiguous range of that order, which begins with its diagonal tile: the only masked
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnplug.ops import Kernel
from attnplug_blocksparse.triton_ops import residue_of

if TYPE_CHECKING:
    from torch import Tensor

TILE = gl.constexpr(64)
"""Keys of a tile, and query rows of a warpgroup."""

_SWIZZLED = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (3, 4)}

_residue_of = gluon.jit(residue_of.fn)


def describe(rows: Tensor) -> TensorDescriptor:
    """Return a descriptor of ``(tokens, heads, size)`` or ``(pages, page_size, heads, size)`` for tiles of a head."""
    box = [64, 1, rows.shape[-1]]
    return TensorDescriptor.from_tensor(rows, [1, *box] if rows.ndim == 4 else box, _SWIZZLED[rows.ndim])


@gluon.jit
def _work_item(
    item: gl.tensor,
    work: gl.tuple,
    pattern: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """
    Return what a work item computes. The first items are the last rows, which have the most keys.

    Returns the head, its KV head and the first row; the residue of its vertical blocks; the first block that is local
    to the first warpgroup; and numbers of tiles: local to both, vertical, all, and those of the second warpgroup.
    """
    _, last, first_head, slide = work
    heads: gl.constexpr = pattern[0]
    block: gl.constexpr = pattern[2]
    local: gl.constexpr = pattern[3]
    stride: gl.constexpr = pattern[4]
    head = item % heads
    kv_head = head // pattern[1]
    tile_begin = (last - item // heads) * (2 * TILE)
    residue = _residue_of(head, kv_head, first_head, slide, stride, pattern[5])
    tiles_per_block: gl.constexpr = block // TILE
    first_local = gl.maximum(tile_begin // block - local + 1, 0)
    both_local = gl.maximum((tile_begin + TILE) // block - local + 1, 0)
    num_local = tile_begin // TILE + 2 - both_local * tiles_per_block
    num_vertical = (first_local + stride - 1 - residue) // stride * tiles_per_block
    num_edge = (both_local - first_local) * tiles_per_block
    num_tiles = num_local + num_vertical + num_edge
    second_tiles = num_tiles - gl.where(first_local % stride == residue, 0, num_edge)
    return head, kv_head, tile_begin, residue, first_local, num_local, num_vertical, num_tiles, second_tiles


@gluon.jit
def _load(
    descriptors: gl.tuple,
    buffers: gl.tuple,
    full: gl.tuple,
    empty: gl.tuple,
    table: gl.tensor,
    bounds: gl.tuple,
    work: gl.tuple,
    pattern: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """
    Load queries, keys and values in the order of the tiles, as soon as a stage is empty.

    Rows before the chunk, or beyond the end of the sequence, are outside the descriptors' tensors, and zero.
    """
    query, key, value = descriptors
    context, length = bounds
    queries, keys, values = buffers
    size: gl.constexpr = shape[0]
    page_size: gl.constexpr = shape[1]
    stages: gl.constexpr = shape[2]
    block: gl.constexpr = pattern[2]
    stride: gl.constexpr = pattern[4]
    tiles_per_block: gl.constexpr = block // TILE
    tile_bytes: gl.constexpr = TILE * size * 2
    item_index = 0
    ring_index = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        head, kv_head, tile_begin, residue, first_local, num_local, num_vertical, num_tiles, _ = _work_item(
            item, work, pattern
        )
        for warpgroup in gl.static_range(2):
            mbarrier.wait(empty[0].index(warpgroup), (item_index & 1) ^ 1)
            mbarrier.expect(full[0].index(warpgroup), tile_bytes)
            query_source = [tile_begin + warpgroup * TILE - context, head, 0]
            tma.async_copy_global_to_shared(query, query_source, full[0].index(warpgroup), queries.index(warpgroup))
        item_index += 1  # noqa: SIM113 - Gluon has no enumerate()
        for tile in range(num_tiles):
            beyond = tile - num_local
            if beyond < 0:
                begin = tile_begin + TILE - tile * TILE
            elif beyond < num_vertical:
                begin = (beyond // tiles_per_block * stride + residue) * block + beyond % tiles_per_block * TILE
            else:
                begin = first_local * block + (beyond - num_vertical) * TILE
            if page_size > 0:
                page = gl.load(table + begin // page_size, mask=begin < length, other=-1)
                source = [page, begin % page_size, kv_head, 0]
            else:
                source = [begin, kv_head, 0]
            stage = ring_index % stages
            phase = (ring_index // stages) & 1
            mbarrier.wait(empty[1].index(stage), phase ^ 1)
            mbarrier.expect(full[1].index(stage), tile_bytes)
            tma.async_copy_global_to_shared(key, source, full[1].index(stage), keys.index(stage))
            mbarrier.wait(empty[2].index(stage), phase ^ 1)
            mbarrier.expect(full[2].index(stage), tile_bytes)
            tma.async_copy_global_to_shared(value, source, full[2].index(stage), values.index(stage))
            ring_index += 1


@gluon.jit
def _skip_tiles(full: gl.tuple, empty: gl.tuple, begin: gl.tensor, end: gl.tensor, stages: gl.constexpr) -> None:
    """Release tiles that this warpgroup skips, once they are loaded: an earlier arrival would end an earlier phase."""
    for ring_index in range(begin, end):
        for operand in gl.static_range(1, 3):  # keys, values
            mbarrier.wait(full[operand].index(ring_index % stages), (ring_index // stages) & 1)
            mbarrier.arrive(empty[operand].index(ring_index % stages), count=1)


@gluon.jit
def _zero_rows(values: gl.tensor, count: gl.tensor, size: gl.constexpr) -> None:
    """Set the values of a page to zero from a row on, which no token has written: the weight 0 times NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // size, size // 8], [4, 1], [1, 0])
    rows = values.load(layout)
    is_written = gl.arange(0, TILE, gl.SliceLayout(1, layout)) < count
    values.store(gl.where(is_written[:, None], rows, 0.0).to(rows.dtype))
    fence_async_shared()


@gluon.jit
def _attend(
    warpgroup: gl.constexpr,
    out_args: gl.tuple,
    lse_args: gl.tuple,
    buffers: gl.tuple,
    outs: gl.tensor,
    full: gl.tuple,
    empty: gl.tuple,
    scale: gl.tensor,
    bounds: gl.tuple,
    work: gl.tuple,
    pattern: gl.constexpr,
    shape: gl.constexpr,
    has_lse: gl.constexpr,
) -> None:
    """
    Compute attention with one warpgroup.

    The scores of a tile are computed during the PV matmul of the tile before. Queries stay in registers: an MMA of 64
    rows by 64 keys that reads both operands from shared memory is bound by its bandwidth.
    """
    size: gl.constexpr = shape[0]
    page_size: gl.constexpr = shape[1]
    stages: gl.constexpr = shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    query_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    prob_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    acc_row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    queries, keys, values = buffers
    out, out_ptr, out_token = out_args
    lse, lse_token, lse_head = lse_args
    context, length = bounds
    dtype: gl.constexpr = queries.dtype
    log2_scale = scale * 1.4426950408889634
    rows = gl.arange(0, TILE, row_layout)
    causal = rows[:, None] >= gl.arange(0, TILE, column_layout)[None, :]
    zero_scores = gl.zeros([TILE, TILE], gl.float32, score_layout)
    item_index = 0
    ring_index = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        head, _, tile_begin, _, _, _, _, num_tiles, second_tiles = _work_item(item, work, pattern)
        begin = ring_index + (1 if warpgroup == 0 else 0)
        end = ring_index + (num_tiles if warpgroup == 0 else second_tiles)
        after = ring_index + num_tiles
        mbarrier.wait(full[0].index(warpgroup), item_index & 1)
        query = queries.index(warpgroup).reshape([TILE, size]).load(query_layout)
        mbarrier.arrive(empty[0].index(warpgroup), count=1)
        _skip_tiles(full, empty, ring_index, begin, stages)

        stage = begin % stages
        mbarrier.wait(full[1].index(stage), (begin // stages) & 1)
        key_t = keys.index(stage).reshape([TILE, size]).permute((1, 0))
        scores = warpgroup_mma(query, key_t, zero_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty[1].index(stage), count=1)
        if page_size > 0 and tile_begin + warpgroup * TILE + TILE > length:
            mbarrier.wait(full[2].index(stage), (begin // stages) & 1)
            _zero_rows(values.index(stage).reshape([TILE, size]), length - tile_begin - warpgroup * TILE, size)
        scores = gl.where(causal, scores, float("-inf"))
        row_max = gl.max(scores, 1) * log2_scale  # finite: a row attends to itself
        probs = gl.exp2(scores * log2_scale - row_max[:, None])
        row_sum = gl.sum(probs, 1)
        operand = gl.convert_layout(probs.to(dtype), prob_layout)
        acc = gl.zeros([TILE, size], gl.float32, acc_layout)
        for tile in range(begin + 1, end):
            stage = tile % stages
            before = (tile - 1) % stages
            mbarrier.wait(full[1].index(stage), (tile // stages) & 1)
            key_t = keys.index(stage).reshape([TILE, size]).permute((1, 0))
            next_scores = warpgroup_mma(query, key_t, zero_scores, use_acc=False, is_async=True)
            mbarrier.wait(full[2].index(before), ((tile - 1) // stages) & 1)
            value_tile = values.index(before).reshape([TILE, size])
            next_acc = warpgroup_mma(operand, value_tile, acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(next_scores,))
            mbarrier.arrive(empty[1].index(stage), count=1)
            new_max = gl.maximum(row_max, gl.max(scores, 1) * log2_scale)
            probs = gl.exp2(scores * log2_scale - new_max[:, None])
            rescale = gl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + gl.sum(probs, 1)
            row_max = new_max
            operand = gl.convert_layout(probs.to(dtype), prob_layout)
            acc = warpgroup_mma_wait(0, deps=(next_acc,))
            mbarrier.arrive(empty[2].index(before), count=1)
            acc = acc * gl.convert_layout(rescale, acc_row_layout)[:, None]
        stage = (end - 1) % stages
        mbarrier.wait(full[2].index(stage), ((end - 1) // stages) & 1)
        value_tile = values.index(stage).reshape([TILE, size])
        acc = warpgroup_mma(operand, value_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty[2].index(stage), count=1)
        _skip_tiles(full, empty, end, after, stages)
        ring_index = after
        item_index += 1  # noqa: SIM113 - Gluon has no enumerate()

        result = (acc * gl.convert_layout(1.0 / row_sum, acc_row_layout)[:, None]).to(dtype)
        row = tile_begin + warpgroup * TILE - context
        if page_size > 0 and row < 0:  # a TMA store before the start of its tensor is an illegal instruction
            chunk_rows = row + gl.arange(0, TILE, acc_row_layout)
            row_mask = (chunk_rows >= 0) & (chunk_rows < length - context)
            columns = head * size + gl.arange(0, size, gl.SliceLayout(0, acc_layout))
            gl.store(
                out_ptr + chunk_rows.to(gl.int64)[:, None] * out_token + columns[None, :],
                result,
                mask=row_mask[:, None],
            )
        else:
            tma.store_wait(0)  # of the item before, from the same buffer
            outs.index(warpgroup).reshape([TILE, size]).store(result)
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [row, head, 0], outs.index(warpgroup))
        if has_lse:
            row_offsets = row + rows
            natural_lse = (row_max + gl.log2(row_sum)) * 0.6931471805599453
            is_written = (row_offsets >= 0) & (row_offsets < length - context)
            gl.store(lse + row_offsets.to(gl.int64) * lse_token + head * lse_head, natural_lse, mask=is_written)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["context", "length", "last", "num_items", "first_head", "slide"],
    do_not_specialize_on_alignment=["lse", "table"],  # a request's slice has any alignment
)
def _warp_specialized_prefill(
    query: gl.tensor,
    key: gl.tensor,
    value: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    table: gl.tensor,
    out_ptr: gl.tensor,
    out_token: gl.int64,
    lse_token: gl.int64,
    lse_head: gl.int64,
    context: gl.int32,
    length: gl.int32,
    last: gl.int32,
    num_items: gl.int32,
    scale: gl.float32,
    first_head: gl.int32,
    slide: gl.int32,
    heads: gl.constexpr,
    group: gl.constexpr,
    size: gl.constexpr,
    block: gl.constexpr,
    local: gl.constexpr,
    stride: gl.constexpr,
    by_kv_head: gl.constexpr,
    page_size: gl.constexpr,
    has_lse: gl.constexpr,
    stages: gl.constexpr,
) -> None:
    """
    Each program takes work items in turn: a head of 128 rows, aligned in the sequence. There is one program per
    multiprocessor.

    Each buffer has two barriers: full, after its load, and empty, after the warpgroups have read it.
    """
    dtype: gl.constexpr = query.dtype
    queries = gl.allocate_shared_memory(dtype, [2, TILE, 1, size], query.layout)
    if page_size > 0:
        keys = gl.allocate_shared_memory(dtype, [stages, 1, TILE, 1, size], key.layout)
        values = gl.allocate_shared_memory(dtype, [stages, 1, TILE, 1, size], value.layout)
    else:
        keys = gl.allocate_shared_memory(dtype, [stages, TILE, 1, size], key.layout)
        values = gl.allocate_shared_memory(dtype, [stages, TILE, 1, size], value.layout)
    outs = gl.allocate_shared_memory(dtype, [2, TILE, 1, size], out.layout)
    queries_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    queries_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    values_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    values_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for warpgroup in gl.static_range(2):
        mbarrier.init(queries_full.index(warpgroup), count=1)
        mbarrier.init(queries_empty.index(warpgroup), count=1)
    for stage in gl.static_range(stages):
        mbarrier.init(keys_full.index(stage), count=1)
        mbarrier.init(keys_empty.index(stage), count=2)  # both warpgroups
        mbarrier.init(values_full.index(stage), count=1)
        mbarrier.init(values_empty.index(stage), count=2)
    fence_async_shared()

    buffers = (queries, keys, values)
    full, empty = (queries_full, keys_full, values_full), (queries_empty, keys_empty, values_empty)
    work = (num_items, last, first_head, slide)
    pattern: gl.constexpr = (heads, group, block, local, stride, by_kv_head)
    out_args = (out, out_ptr, out_token)
    lse_args = (lse, lse_token, lse_head)
    bounds = (context, length)
    shape: gl.constexpr = (size, page_size, stages)
    gl.warp_specialize(
        [
            (
                _attend,
                (0, out_args, lse_args, buffers, outs, full, empty, scale, bounds, work, pattern, shape, has_lse),
            ),
            (
                _attend,
                (1, out_args, lse_args, buffers, outs, full, empty, scale, bounds, work, pattern, shape, has_lse),
            ),
            (_load, ((query, key, value), buffers, full, empty, table, bounds, work, pattern, shape)),
        ],
        [4, 1],  # warps beside those of the launch: the second warpgroup, and one that loads
        [240, 24],  # their registers
    )


prefill_kernel = Kernel(_warp_specialized_prefill)
