"""
The kernel for one prompt, or one chunk of it, on Hopper, whose warps have roles. Imported only where Triton has Gluon.

One warp loads tiles of keys and values into a ring in shared memory. Two warpgroups attend 64 query rows each, one
after the other in the sequence, and both from the same tiles: vertical blocks do not depend on the query, so that each
is loaded once for 128 rows.

The tiles of both come in one order:

- what is local to both, backwards from the diagonal of the second warpgroup, which the first leaves out;
- vertical blocks, which both attend;
- a block that is local to the first alone; the second attends it where it is vertical, and else leaves it out.

So what each attends is one piece of that order, it begins with the diagonal, and that is all that is ever masked.
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
from attnplug_blocksparse.triton_pattern import residue_of

if TYPE_CHECKING:
    from torch import Tensor

TILE = gl.constexpr(64)
"""Keys of a tile, and query rows of a warpgroup."""

_SWIZZLED = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (3, 4)}

_residue_of = gluon.jit(residue_of.fn)


def described(rows: Tensor) -> TensorDescriptor:
    """Describe ``(tokens, heads, head_size)`` or ``(pages, page_size, heads, head_size)`` by tiles of one head."""
    box = [64, 1, rows.shape[-1]]
    return TensorDescriptor.from_tensor(rows, [1, *box] if rows.ndim == 4 else box, _SWIZZLED[rows.ndim])


@gluon.jit
def _work_of(
    item: gl.tensor,
    work: gl.tuple,
    pattern: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """
    What an item is, the last rows first: those have most to do.

    Returns its head, its KV head and its first row; the remainder of its vertical blocks; the first block that is local
    to its first warpgroup; and numbers of tiles: local to both, vertical, all, and those up to where the second ends.
    """
    _, last, first, step = work
    heads: gl.constexpr = pattern[0]
    block: gl.constexpr = pattern[2]
    local: gl.constexpr = pattern[3]
    stride: gl.constexpr = pattern[4]
    head = item % heads
    kv_head = head // pattern[1]
    place = (last - item // heads) * (2 * TILE)
    residue = _residue_of(head, kv_head, first, step, stride, pattern[5])
    parts: gl.constexpr = block // TILE
    of_first = gl.maximum(place // block - local + 1, 0)
    of_both = gl.maximum((place + TILE) // block - local + 1, 0)
    near = place // TILE + 2 - of_both * parts
    far = (of_first + stride - 1 - residue) // stride * parts
    edge = (of_both - of_first) * parts
    total = near + far + edge
    to_second = total - gl.where(of_first % stride == residue, 0, edge)
    return head, kv_head, place, residue, of_first, near, far, total, to_second


@gluon.jit
def _load(
    described: gl.tuple,
    buffers: gl.tuple,
    full: gl.tuple,
    empty: gl.tuple,
    table: gl.tensor,
    ends: gl.tuple,
    work: gl.tuple,
    pattern: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """
    Load queries, keys and values in the order in which they are attended, as soon as there is room.

    What is before the chunk, or behind the end of the sequence, is outside of what is described, and zero.
    """
    query, key, value = described
    context, length = ends
    queries, keys, values = buffers
    size: gl.constexpr = shape[0]
    page_size: gl.constexpr = shape[1]
    stages: gl.constexpr = shape[2]
    block: gl.constexpr = pattern[2]
    stride: gl.constexpr = pattern[4]
    parts: gl.constexpr = block // TILE
    tile_bytes: gl.constexpr = TILE * size * 2
    turn = 0
    at = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        head, kv_head, place, residue, of_first, near, far, total, _ = _work_of(item, work, pattern)
        for which in gl.static_range(2):
            mbarrier.wait(empty[0].index(which), (turn & 1) ^ 1)
            mbarrier.expect(full[0].index(which), tile_bytes)
            where = [place + which * TILE - context, head, 0]
            tma.async_copy_global_to_shared(query, where, full[0].index(which), queries.index(which))
        turn += 1  # noqa: SIM113 - Gluon has no enumerate()
        for tile in range(total):
            behind = tile - near
            if behind < 0:
                begin = place + TILE - tile * TILE
            elif behind < far:
                begin = (behind // parts * stride + residue) * block + behind % parts * TILE
            else:
                begin = of_first * block + (behind - far) * TILE
            if page_size > 0:
                page = gl.load(table + begin // page_size, mask=begin < length, other=-1)
                source = [page, begin % page_size, kv_head, 0]
            else:
                source = [begin, kv_head, 0]
            slot = at % stages
            phase = (at // stages) & 1
            mbarrier.wait(empty[1].index(slot), phase ^ 1)
            mbarrier.expect(full[1].index(slot), tile_bytes)
            tma.async_copy_global_to_shared(key, source, full[1].index(slot), keys.index(slot))
            mbarrier.wait(empty[2].index(slot), phase ^ 1)
            mbarrier.expect(full[2].index(slot), tile_bytes)
            tma.async_copy_global_to_shared(value, source, full[2].index(slot), values.index(slot))
            at += 1


@gluon.jit
def _leave_out(full: gl.tuple, empty: gl.tuple, begin: gl.tensor, end: gl.tensor, stages: gl.constexpr) -> None:
    """Give tiles back that are not attended, once they are there: not before, or an earlier turn would be ended."""
    for at in range(begin, end):
        for ring in gl.static_range(1, 3):
            mbarrier.wait(full[ring].index(at % stages), (at // stages) & 1)
            mbarrier.arrive(empty[ring].index(at % stages), count=1)


@gluon.jit
def _clear(values: gl.tensor, count: gl.tensor, size: gl.constexpr) -> None:
    """Let values of a page be zero from a row on, to which nobody has written: a weight of 0 times NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // size, size // 8], [4, 1], [1, 0])
    kept = values.load(layout)
    inside = gl.arange(0, TILE, gl.SliceLayout(1, layout)) < count
    values.store(gl.where(inside[:, None], kept, 0.0).to(kept.dtype))
    fence_async_shared()


@gluon.jit
def _attend(
    which: gl.constexpr,
    target: gl.tuple,
    logs: gl.tuple,
    buffers: gl.tuple,
    outs: gl.tensor,
    full: gl.tuple,
    empty: gl.tuple,
    scale: gl.tensor,
    ends: gl.tuple,
    work: gl.tuple,
    pattern: gl.constexpr,
    shape: gl.constexpr,
    has_lse: gl.constexpr,
) -> None:
    """
    Attend with one warpgroup.

    The scores of a tile are computed while the values of the tile before are still weighed, and queries are kept in
    registers: products of 64 rows by 64 keys would otherwise wait for shared memory, which has twice as much to read.
    """
    size: gl.constexpr = shape[0]
    page_size: gl.constexpr = shape[1]
    stages: gl.constexpr = shape[2]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    of_queries: gl.constexpr = gl.DotOperandLayout(0, of_scores, 2)
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_total, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_columns: gl.constexpr = gl.SliceLayout(0, of_scores)
    of_shares: gl.constexpr = gl.SliceLayout(1, of_total)
    queries, keys, values = buffers
    out, out_at, out_token = target
    lse, of_token, of_head = logs
    context, length = ends
    kind: gl.constexpr = queries.dtype
    factor = scale * 1.4426950408889634
    rows = gl.arange(0, TILE, of_rows)
    seen = rows[:, None] >= gl.arange(0, TILE, of_columns)[None, :]
    nothing = gl.zeros([TILE, TILE], gl.float32, of_scores)
    turn = 0
    at = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        head, _, place, _, _, _, _, total, to_second = _work_of(item, work, pattern)
        begin = at + (1 if which == 0 else 0)
        end = at + (total if which == 0 else to_second)
        after = at + total
        mbarrier.wait(full[0].index(which), turn & 1)
        query = queries.index(which).reshape([TILE, size]).load(of_queries)
        mbarrier.arrive(empty[0].index(which), count=1)
        _leave_out(full, empty, at, begin, stages)

        slot = begin % stages
        mbarrier.wait(full[1].index(slot), (begin // stages) & 1)
        turned = keys.index(slot).reshape([TILE, size]).permute((1, 0))
        scores = warpgroup_mma(query, turned, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty[1].index(slot), count=1)
        if page_size > 0 and place + which * TILE + TILE > length:
            mbarrier.wait(full[2].index(slot), (begin // stages) & 1)
            _clear(values.index(slot).reshape([TILE, size]), length - place - which * TILE, size)
        scores = gl.where(seen, scores, float("-inf"))
        highest = gl.max(scores, 1) * factor  # finite: the diagonal is seen
        weights = gl.exp2(scores * factor - highest[:, None])
        sums = gl.sum(weights, 1)
        shares = gl.convert_layout(weights.to(kind), of_weights)
        sum_of_values = gl.zeros([TILE, size], gl.float32, of_total)
        for tile in range(begin + 1, end):
            slot = tile % stages
            before = (tile - 1) % stages
            mbarrier.wait(full[1].index(slot), (tile // stages) & 1)
            turned = keys.index(slot).reshape([TILE, size]).permute((1, 0))
            ahead = warpgroup_mma(query, turned, nothing, use_acc=False, is_async=True)
            mbarrier.wait(full[2].index(before), ((tile - 1) // stages) & 1)
            rows_of_values = values.index(before).reshape([TILE, size])
            running = warpgroup_mma(shares, rows_of_values, sum_of_values, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(ahead,))
            mbarrier.arrive(empty[1].index(slot), count=1)
            top = gl.maximum(highest, gl.max(scores, 1) * factor)
            weights = gl.exp2(scores * factor - top[:, None])
            shrink = gl.exp2(highest - top)
            sums = sums * shrink + gl.sum(weights, 1)
            highest = top
            shares = gl.convert_layout(weights.to(kind), of_weights)
            sum_of_values = warpgroup_mma_wait(0, deps=(running,))
            mbarrier.arrive(empty[2].index(before), count=1)
            sum_of_values = sum_of_values * gl.convert_layout(shrink, of_shares)[:, None]
        slot = (end - 1) % stages
        mbarrier.wait(full[2].index(slot), ((end - 1) // stages) & 1)
        rows_of_values = values.index(slot).reshape([TILE, size])
        sum_of_values = warpgroup_mma(shares, rows_of_values, sum_of_values, is_async=True)
        sum_of_values = warpgroup_mma_wait(0, deps=(sum_of_values,))
        mbarrier.arrive(empty[2].index(slot), count=1)
        _leave_out(full, empty, end, after, stages)
        at = after
        turn += 1  # noqa: SIM113 - Gluon has no enumerate()

        result = (sum_of_values * gl.convert_layout(1.0 / sums, of_shares)[:, None]).to(kind)
        row = place + which * TILE - context
        if page_size > 0 and row < 0:  # a store by descriptor that begins before a tensor is an illegal instruction
            of_chunk = row + gl.arange(0, TILE, of_shares)
            mine = (of_chunk >= 0) & (of_chunk < length - context)
            columns = head * size + gl.arange(0, size, gl.SliceLayout(0, of_total))
            gl.store(out_at + of_chunk.to(gl.int64)[:, None] * out_token + columns[None, :], result, mask=mine[:, None])
        else:
            tma.store_wait(0)  # of the item before, from the same place
            outs.index(which).reshape([TILE, size]).store(result)
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [row, head, 0], outs.index(which))
        if has_lse:
            places = row + rows
            natural = (highest + gl.log2(sums)) * 0.6931471805599453
            inside = (places >= 0) & (places < length - context)
            gl.store(lse + places.to(gl.int64) * of_token + head * of_head, natural, mask=inside)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["context", "length", "last", "items", "first", "step"],
    do_not_specialize_on_alignment=["lse", "table"],  # a request's part of them begins anywhere
)
def _prompt_by_roles(
    query: gl.tensor,
    key: gl.tensor,
    value: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    table: gl.tensor,
    out_at: gl.tensor,
    out_token: gl.int64,
    lse_token: gl.int64,
    lse_head: gl.int64,
    context: gl.int32,
    length: gl.int32,
    last: gl.int32,
    items: gl.int32,
    scale: gl.float32,
    first: gl.int32,
    step: gl.int32,
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
    Programs, as many as there are multiprocessors, take items in turn, each a head of 128 rows of the sequence: tiles
    begin at multiples of their size in it, wherever a chunk begins.

    Whatever is handed over has two barriers: one that it is there, and one that its place is free again.
    """
    kind: gl.constexpr = query.dtype
    queries = gl.allocate_shared_memory(kind, [2, TILE, 1, size], query.layout)
    if page_size > 0:
        keys = gl.allocate_shared_memory(kind, [stages, 1, TILE, 1, size], key.layout)
        values = gl.allocate_shared_memory(kind, [stages, 1, TILE, 1, size], value.layout)
    else:
        keys = gl.allocate_shared_memory(kind, [stages, TILE, 1, size], key.layout)
        values = gl.allocate_shared_memory(kind, [stages, TILE, 1, size], value.layout)
    outs = gl.allocate_shared_memory(kind, [2, TILE, 1, size], out.layout)
    queries_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    queries_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    keys_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    values_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    values_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(queries_full.index(which), count=1)
        mbarrier.init(queries_empty.index(which), count=1)
    for slot in gl.static_range(stages):
        mbarrier.init(keys_full.index(slot), count=1)
        mbarrier.init(keys_empty.index(slot), count=2)  # both warpgroups
        mbarrier.init(values_full.index(slot), count=1)
        mbarrier.init(values_empty.index(slot), count=2)
    fence_async_shared()

    buffers = (queries, keys, values)
    full, empty = (queries_full, keys_full, values_full), (queries_empty, keys_empty, values_empty)
    work = (items, last, first, step)
    pattern: gl.constexpr = (heads, group, block, local, stride, by_kv_head)
    target = (out, out_at, out_token)
    logs = (lse, lse_token, lse_head)
    ends = (context, length)
    shape: gl.constexpr = (size, page_size, stages)
    gl.warp_specialize(
        [
            (_attend, (0, target, logs, buffers, outs, full, empty, scale, ends, work, pattern, shape, has_lse)),
            (_attend, (1, target, logs, buffers, outs, full, empty, scale, ends, work, pattern, shape, has_lse)),
            (_load, ((query, key, value), buffers, full, empty, table, ends, work, pattern, shape)),
        ],
        [4, 1],  # warps beside those of the launch: the second warpgroup, and one that loads
        [240, 24],  # their registers
    )


prompt_kernel = Kernel(_prompt_by_roles)
