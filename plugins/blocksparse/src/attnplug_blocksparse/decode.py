"""Launches the kernels of decodes, one token per sequence: splits of each sequence, then their merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from attnplug.ops import Kernel, merge_splits, split_views
from attnplug_blocksparse.triton_decode import _decode
from attnplug_blocksparse.triton_ops import INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_blocksparse.plan import DecodePlan, Scales

_MIN_LANES = 16
"""The fewest rows of a matrix product."""

_decode_kernel = Kernel(_decode)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    plan: DecodePlan,
    scales: Scales,
) -> None:
    """
    Compute attention, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        key: The KV cache, ``(num_blocks, page_size, num_kv_heads, head_size)``; the last stride is 1.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``, heads contiguous.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        plan: The requests.
        scales: The layer's scales.
    """
    requests, (rows, heads, size), kv_heads = plan.seq_lens.shape[0], query.shape, key.shape[2]
    pattern, tiles, splits = plan.pattern, plan.tiles, plan.num_splits
    width = triton.next_power_of_2(size)
    parts = part_lse = unused = query  # an argument that the kernel does not read is any tensor
    if splits > 1:
        parts, part_lse = split_views(plan.scratch, rows, heads, splits, size)
    tensors = (
        query, key, value, out, unused if lse is None else lse, parts, part_lse, plan.query_starts, plan.seq_lens,
        plan.table, pattern.residues, pattern.residues_below,
        unused if scales.key is None else scales.key, unused if scales.value is None else scales.value,
    )  # fmt: skip
    lse_strides = (0, 0) if lse is None else lse.stride()
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], out.stride(0), *lse_strides)
    scalars = (plan.table.stride(0), requests, splits, scales.softmax, *pattern.scalars)
    group = heads // kv_heads
    lanes = max(_MIN_LANES, triton.next_power_of_2(group))
    constants = (
        kv_heads, group, lanes, size, width, key.shape[1], *pattern.constants, scales.key is not None, splits > 1,
        lse is not None, tiles.keys, tiles.stages, INTERPRETED,
    )  # fmt: skip
    _decode_kernel.run(requests * kv_heads * splits, tensors, strides, scalars, constants, num_warps=tiles.warps)
    if splits > 1:
        merge_splits(parts, part_lse, out, lse, plan.query_starts)
