"""Launches prefills: all requests of a step in one launch, or each in its own where that is faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from attnplug.ops import Kernel
from attnplug_blocksparse import prefill_single
from attnplug_blocksparse.triton_ops import INTERPRETED
from attnplug_blocksparse.triton_prefill import _prefill

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_blocksparse.plan import PrefillPlan, Scales

_INT32_ELEMENTS = 2**31
"""Offsets from this many elements on need 64 bits."""

_prefill_kernel = Kernel(_prefill)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    plan: PrefillPlan,
    scales: Scales,
) -> None:
    """
    Compute attention, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        key: Contiguous K/V ``(tokens, num_kv_heads, head_size)``, one request after another, or the KV cache
            ``(num_blocks, page_size, num_kv_heads, head_size)``; the last stride is 1.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``, heads contiguous.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        plan: The requests.
        scales: The layer's scales.
    """
    if plan.query_lens:
        specialized = plan.hopper is not None and prefill_single.supports_specialized(
            query, key, value, out, plan.pattern
        )
        if specialized or (plan.table is None and prefill_single.supports_tma(key, value, plan.pattern, plan.tiles)):
            _attend_each(query, key, value, out, lse, plan, scales, specialized=specialized)
            return
    _attend_all(query, key, value, out, lse, plan, scales)


def _attend_all(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None, plan: PrefillPlan, scales: Scales
) -> None:
    requests, (heads, size) = plan.seq_lens.shape[0], query.shape[1:]
    tiles, page_size = plan.tiles, 0 if plan.table is None else key.shape[1]
    # One more tile than the rows need: tiles are aligned in the sequence, and a chunk may begin inside one.
    num_tiles = -(-plan.max_query_len // tiles.rows) + 1
    unused = query  # an argument that the kernel does not read is any tensor
    tensors = (
        query, key, value, out, unused if lse is None else lse, plan.query_starts,
        plan.query_starts if plan.key_starts is None else plan.key_starts,
        plan.seq_lens, plan.seq_lens if plan.table is None else plan.table,
        unused if scales.key is None else scales.key, unused if scales.value is None else scales.value,
    )  # fmt: skip
    page_strides = (key.stride(0), value.stride(0)) if page_size else (0, 0)
    strides = (
        query.stride(0), query.stride(1), page_strides[0], *key.stride()[-3:-1], page_strides[1],
        *value.stride()[-3:-1], out.stride(0), *((0, 0) if lse is None else lse.stride()),
    )  # fmt: skip
    table_stride = 0 if plan.table is None else plan.table.stride(0)
    scalars = (table_stride, requests, num_tiles, scales.softmax, *plan.pattern.scalars)
    constants = (
        heads, heads // key.shape[-2], size, triton.next_power_of_2(size), page_size, *plan.pattern.constants,
        scales.key is not None, lse is not None, _is_wide(key, value, plan), tiles.rows, tiles.keys, tiles.stages,
        INTERPRETED,
    )  # fmt: skip
    programs = num_tiles * requests * heads
    _prefill_kernel.run(programs, tensors, strides, scalars, constants, **tiles.options)


def _is_wide(key: Tensor, value: Tensor, plan: PrefillPlan) -> bool:
    """Whether offsets inside one tile of contiguous keys, perhaps of several vertical blocks, exceed 32 bits."""
    block, _, stride, _ = plan.pattern.constants
    tokens = plan.tiles.keys * (stride if block <= plan.tiles.keys else 1)
    return plan.table is None and tokens * max(key.stride(0), value.stride(0)) >= _INT32_ELEMENTS


def _attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    plan: PrefillPlan,
    scales: Scales,
    *,
    specialized: bool,
) -> None:
    first = 0
    for request, length in enumerate(plan.query_lens):
        rows = slice(first, first + length)
        first += length
        if not length:
            continue
        keys, values = (key, value) if plan.table is not None else (key[rows], value[rows])
        own = (query[rows], keys, values, out[rows], None if lse is None else lse[rows], plan.pattern, scales)
        if plan.hopper is None or not specialized:
            prefill_single.attend_tma(*own, plan.tiles)
        elif plan.table is None:
            prefill_single.attend_specialized(*own, plan.hopper)
        else:
            table, key_len = plan.table[request], plan.key_lens[request]
            prefill_single.attend_specialized(*own, plan.hopper, table=table, length=key_len)
