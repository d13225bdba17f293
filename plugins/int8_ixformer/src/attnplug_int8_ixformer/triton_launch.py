"""Plans of the Triton kernels, and their launches: cache writes, decodes, and prefills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from attrs import field, frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnplug.ops import Kernel, merge_splits, split_views
from attnplug_int8_ixformer.tiles import DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_decode import _decode
from attnplug_int8_ixformer.triton_prefill import _gather, _prefill, _write
from attnplug_int8_ixformer.triton_prefill_tma import _prefill_tma

if TYPE_CHECKING:
    from attnplug_int8_ixformer.pages import Pages
    from attnplug_int8_ixformer.provider import ScoreParams

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on any device."""

UNIT: Final = 128
"""Gathered sequences begin at multiples of this many columns."""

_SCALE_BYTES: Final = 4
_MIN_LANES: Final = 16
"""The fewest rows, and keys, of a matrix product."""

_write_kernel, _decode_kernel = Kernel(_write), Kernel(_decode)
_gather_kernel, _prefill_kernel, _prefill_tma_kernel = Kernel(_gather), Kernel(_prefill), Kernel(_prefill_tma)


@frozen(eq=False, kw_only=True)
class DecodePlan:
    """
    The decodes of a step.

    Attributes:
        query_starts: ``(num_reqs + 1,)`` int32: the rows of each request; a request without rows is padding.
        seq_lens: ``(num_reqs,)`` int32 keys per request, the new ones included.
        table: ``(num_reqs, max_blocks)`` int32 block table.
        max_query_len: The most new tokens of a request.
        num_splits: Splits of each sequence.
        scratch: Scratch memory of `attnplug.ops.split_bytes`, uint8, uninitialized.
        tiles: The tile sizes.
    """

    query_starts: Tensor
    seq_lens: Tensor
    table: Tensor
    max_query_len: int
    num_splits: int
    scratch: Tensor
    tiles: DecodeTiles


@frozen(eq=False, kw_only=True)
class PrefillPlan:
    """
    Some prefills of a step, chunks included: one launch, and one that gathers at level 1.

    Attributes:
        query_starts: ``(all requests + 1,)`` int32.
        seq_lens: ``(all requests,)`` int32 keys.
        table: ``(all requests, max_blocks)`` int32 block table.
        key_starts: ``(all requests,)`` int32: the first gathered column of each, a multiple of `UNIT`.
        first: The first request of the launch.
        count: Requests of the launch.
        max_query_len: Rows of the longest of all requests.
        max_seq_len: Keys of the longest of all requests.
        scratch: ``(columns * column_bytes,)`` uint8, uninitialized.
        tiles: The tile sizes.
        uses_tma: Whether keys are gathered too, and TMA descriptors load keys and values. Level 1 only.
    """

    query_starts: Tensor
    seq_lens: Tensor
    table: Tensor
    key_starts: Tensor
    first: int
    count: int
    max_query_len: int
    max_seq_len: int
    scratch: Tensor
    tiles: PrefillTiles = field(factory=PrefillTiles)
    uses_tma: bool = False


@frozen(eq=False)
class GatheredKv:
    """
    Keys and values of level 1 prefills, gathered from their pages into scratch memory.

    Attributes:
        columns: The capacity in tokens.
        values_t: ``(kv_heads * size, columns)`` int8 values, transposed.
        keys: ``(kv_heads * columns, size)`` int8 keys, if they are gathered.
        key_scales: ``(kv_heads * columns,)`` float32 scales of the keys, if they are gathered.
    """

    columns: int
    values_t: Tensor
    keys: Tensor
    key_scales: Tensor

    @classmethod
    def of(cls, scratch: Tensor, kv_heads: int, size: int, *, with_keys: bool) -> GatheredKv:
        """Return views of scratch memory."""
        columns = scratch.shape[0] // column_bytes(kv_heads, size, with_keys=with_keys) // UNIT * UNIT
        rows, count = columns * kv_heads, 2 if with_keys else 1
        both = scratch[: count * rows * size].view(torch.int8)
        values_t, keys = both[: rows * size], both[(count - 1) * rows * size :]
        begin = count * rows * size
        scales = scratch[begin : begin + _SCALE_BYTES * rows].view(torch.float32) if with_keys else scratch
        return cls(columns, values_t.view(kv_heads * size, columns), keys.view(rows, size), scales)


def column_bytes(kv_heads: int, size: int, *, with_keys: bool) -> int:
    """Return the bytes of scratch memory per gathered token: values, and keys with their scales."""
    return kv_heads * (2 * size + _SCALE_BYTES if with_keys else size)


def aligned(tokens: int) -> int:
    """Return the columns that a sequence takes: a multiple of `UNIT`."""
    return -(-tokens // UNIT) * UNIT


def group_requests(lengths: list[int], columns: int) -> list[tuple[int, int]]:
    """Return runs of requests, ``(first, count)`` each, whose keys fit the columns."""
    groups, used = [(0, 0)], 0
    for request, length in enumerate(lengths):
        needed = aligned(length)
        if used + needed > columns and groups[-1][1]:
            groups, used = [*groups, (request, 0)], 0
        groups[-1], used = (groups[-1][0], groups[-1][1] + 1), used + needed
    return groups


def width_of(size: int) -> int:
    """Return the power of 2 that a head is padded to in a tile."""
    return int(triton.next_power_of_2(size))


def page_strides(pages: Pages) -> tuple[int, ...]:
    """Return the strides of keys, values and key scales."""
    return (*pages.keys.stride()[:3], *pages.values.stride()[:3], *pages.key_scales.stride()[:2])


def score_forms(params: ScoreParams) -> tuple[object, ...]:
    """Return the compile-time forms of scores: window, soft cap, and the kind of ALiBi."""
    alibi = 0 if params.slopes is None else 2 if params.is_sqrt else 1
    return params.left >= 0, params.soft_cap > 0, alibi


def write_rows(key: Tensor, value: Tensor, pages: Pages, slots: Tensor) -> None:
    """Quantize rows, and write them and their scales to the KV cache. Arguments as of `Provider.write`."""
    scales = pages.value_scales
    size, kv_heads = key.shape[2], key.shape[1]
    tensors = (
        key, value, pages.keys, pages.values, pages.key_scales, pages.key_scales if scales is None else scales,
        slots.contiguous(),
    )  # fmt: skip
    constants = (
        *page_strides(pages), kv_heads, triton.next_power_of_2(kv_heads), size, width_of(size), pages.keys.shape[1],
        scales is not None,
    )  # fmt: skip
    strides = (*key.stride()[:2], *value.stride()[:2])
    _write_kernel.run(slots.shape[0], tensors, strides, (), constants, num_warps=4)


def attend_decode(
    query: Tensor, new: tuple[Tensor, Tensor] | None, pages: Pages, out: Tensor, plan: DecodePlan, params: ScoreParams
) -> None:
    """
    Compute attention of decodes, and write their new rows if passed. Arguments as of `Provider.decode`.

    Rows of `query` beyond those of the last request are padding: neither read nor written.
    """
    (rows, heads, size), kv_heads = query.shape, pages.keys.shape[2]
    requests, splits, tiles = plan.seq_lens.shape[0], plan.num_splits, plan.tiles
    key, value = (query, query) if new is None else new
    scales, group = pages.value_scales, heads // kv_heads
    unused = pages.key_scales  # an argument that the kernel does not read is any tensor
    parts = part_lse = unused
    if splits > 1:
        parts, part_lse = split_views(plan.scratch, rows, heads, splits, size)
    tensors = (
        query, key, value, out, parts, part_lse, pages.keys, pages.values, pages.key_scales,
        unused if scales is None else scales, unused if params.slopes is None else params.slopes,
        plan.query_starts, plan.seq_lens, plan.table,
    )  # fmt: skip
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], out.stride(0))
    scalars = (plan.table.stride(0), requests, splits, params.left, params.scale, params.soft_cap)
    constants = (
        kv_heads, group, max(_MIN_LANES, triton.next_power_of_2(group * plan.max_query_len)),
        max(_MIN_LANES, triton.next_power_of_2(plan.max_query_len)), size, width_of(size), pages.keys.shape[1],
        *page_strides(pages), *score_forms(params), scales is not None, new is not None, splits > 1, tiles.keys,
        tiles.stages, INTERPRETED,
    )  # fmt: skip
    _decode_kernel.run(requests * kv_heads * splits, tensors, strides, scalars, constants, num_warps=tiles.warps)
    if splits > 1:
        merge_splits(parts, part_lse, out, None, plan.query_starts)


# --- prefills ---------------------------------------------------------------------------------------------------------


def attend_prefill(query: Tensor, pages: Pages, out: Tensor, plan: PrefillPlan, params: ScoreParams) -> None:
    """Compute attention of prefills, whose keys are all in the cache. Arguments as of `Provider.prefill`."""
    if pages.value_scales is None:
        _attend_pages(query, pages, out, plan, params, None)
        return
    kv_heads, size = pages.keys.shape[2:]
    gathered = GatheredKv.of(plan.scratch, kv_heads, size, with_keys=plan.uses_tma)
    _gather_all(pages, plan, params, gathered)
    if plan.uses_tma:
        _attend_tma(query, pages, out, plan, params, gathered)
    else:
        _attend_pages(query, pages, out, plan, params, gathered)


def _gather_all(pages: Pages, plan: PrefillPlan, params: ScoreParams, gathered: GatheredKv) -> None:
    kv_heads, size = pages.keys.shape[2:]
    units = -(-plan.max_seq_len // UNIT)
    tensors = (
        pages.keys, pages.values, pages.key_scales, gathered.values_t, gathered.keys, gathered.key_scales,
        plan.key_starts, plan.seq_lens, plan.table, plan.query_starts,
    )  # fmt: skip
    scalars = (plan.table.stride(0), units, plan.first, params.left)
    constants = (
        *page_strides(pages), kv_heads, size, width_of(size), pages.keys.shape[1], params.left >= 0,
        plan.uses_tma, UNIT,
    )  # fmt: skip
    programs = plan.count * units * kv_heads
    _gather_kernel.run(programs, tensors, (gathered.columns,), scalars, constants, num_warps=4)


def _attend_tma(
    query: Tensor, pages: Pages, out: Tensor, plan: PrefillPlan, params: ScoreParams, gathered: GatheredKv
) -> None:
    """Compute attention over gathered keys and values, loaded through TMA descriptors."""
    (_, heads, size), kv_heads, tiles = query.shape, pages.keys.shape[2], plan.tiles
    scales: Any = pages.value_scales
    width, num_tiles = width_of(size), -(-plan.max_query_len // tiles.rows)
    programs = plan.count * num_tiles * heads
    if not programs:
        return  # a descriptor of an empty tensor is invalid
    rows = (_describe(gathered.keys, tiles.keys, width), _describe(gathered.values_t, width, tiles.keys))
    tensors = (
        query, out, gathered.key_scales, scales, scales if params.slopes is None else params.slopes,
        plan.query_starts, plan.key_starts, plan.seq_lens,
    )  # fmt: skip
    strides = (*query.stride()[:2], out.stride(0), gathered.columns)
    scalars = (plan.count, num_tiles, plan.first, params.left, params.scale, params.soft_cap)
    constants = (
        kv_heads, heads // kv_heads, size, width, *score_forms(params), tiles.rows, tiles.keys, tiles.stages,
    )  # fmt: skip
    _prefill_tma_kernel.run(programs, tensors, strides, scalars, constants, descriptors=rows, num_warps=tiles.warps)


def _describe(rows: Tensor, *box: int) -> Any:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), list(box))


def _attend_pages(
    query: Tensor, pages: Pages, out: Tensor, plan: PrefillPlan, params: ScoreParams, gathered: GatheredKv | None
) -> None:
    """Compute attention over keys in their pages, and values in their pages or gathered."""
    (_, heads, size), kv_heads, page_size = query.shape, pages.keys.shape[2], pages.keys.shape[1]
    scales, tiles = pages.value_scales, plan.tiles
    num_tiles = -(-plan.max_query_len // tiles.rows)
    tensors = (
        query, out, pages.keys, pages.values, pages.key_scales, pages.key_scales if scales is None else scales,
        pages.values if gathered is None else gathered.values_t,
        pages.key_scales if params.slopes is None else params.slopes, plan.query_starts, plan.key_starts,
        plan.seq_lens, plan.table,
    )  # fmt: skip
    strides = (*query.stride()[:2], out.stride(0), 0 if gathered is None else gathered.columns)
    scalars = (
        plan.table.stride(0), plan.count, num_tiles, plan.first, params.left, params.scale, params.soft_cap,
    )  # fmt: skip
    constants = (
        kv_heads, heads // kv_heads, size, width_of(size), page_size, *page_strides(pages), *score_forms(params),
        scales is not None, tiles.rows, tiles.keys, tiles.stages, INTERPRETED,
    )  # fmt: skip
    programs = plan.count * num_tiles * heads
    _prefill_kernel.run(programs, tensors, strides, scalars, constants, num_warps=tiles.warps)
