"""Launches the kernels for one token per sequence: parts of each sequence, then their merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from attrs import frozen
from torch import Tensor

from attnplug.ops import Kernel
from attnplug_blocksparse.tiles import MOST_SPLITS, DecodeTiles
from attnplug_blocksparse.triton_decode import _decode, _merge
from attnplug_blocksparse.triton_softmax import INTERPRETED

if TYPE_CHECKING:
    from attnplug_blocksparse.pattern import Pattern
    from attnplug_blocksparse.scales import Scales

_LEAST_LANES = 16
"""Rows that a matrix product has at least."""

_FEW = 8
"""Parts that the smaller of two kernels merges."""

_decode_kernel, _merge_kernel = Kernel(_decode), Kernel(_merge)


@frozen(eq=False, kw_only=True)
class Tokens:
    """
    The requests of one launch.

    Attributes:
        pattern: Which blocks a head attends.
        tiles: How it is computed.
        query_starts: ``(num_reqs + 1,)`` int32: the row of each request; one without a row is padding.
        seq_lens: ``(num_reqs,)`` int32 keys per request, the new one included.
        table: ``(num_reqs, max_blocks)`` int32 pages.
        num_splits: Parts of each sequence.
        scratch: ``(scratch_bytes,)`` uint8; what it holds before and after means nothing.
    """

    pattern: Pattern
    tiles: DecodeTiles
    query_starts: Tensor
    seq_lens: Tensor
    table: Tensor
    num_splits: int
    scratch: Tensor


def scratch_bytes(parts: int, heads: int, head_size: int) -> int:
    """Return the size of the partial results, outputs and their sums in float32, of so many parts of sequences."""
    return 4 * parts * heads * (head_size + 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    tokens: Tokens,
    scales: Scales,
) -> None:
    """
    Attend, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        key: The pages ``(num_blocks, page_size, num_kv_heads, head_size)``, of any strides but the last.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``, heads side by side.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        tokens: The requests.
        scales: Of the layer.
    """
    requests, (heads, size), kv_heads = tokens.seq_lens.shape[0], query.shape[1:], key.shape[2]
    pattern, tiles, splits = tokens.pattern, tokens.tiles, tokens.num_splits
    width = triton.next_power_of_2(size)
    sums = query if lse is None else lse
    parts, part_sums = _parts(tokens.scratch, splits * requests * heads, size) if splits > 1 else (sums, sums)
    tensors = (
        query, key, value, out, sums, parts, part_sums, tokens.query_starts, tokens.seq_lens, tokens.table,
        pattern.residues, pattern.before,
        sums if scales.keys is None else scales.keys, sums if scales.values is None else scales.values,
    )  # fmt: skip
    of_sums = (0, 0) if lse is None else lse.stride()
    strides = (*query.stride()[:2], *key.stride()[:3], *value.stride()[:3], out.stride(0), *of_sums)
    numbers = (tokens.table.stride(0), requests, splits, scales.scores, *pattern.numbers)
    group = heads // kv_heads
    lanes = max(_LEAST_LANES, triton.next_power_of_2(group))
    constants = (
        kv_heads, group, lanes, size, width, key.shape[1], *pattern.constants, scales.keys is not None, splits > 1,
        lse is not None, tiles.keys, tiles.stages, INTERPRETED,
    )  # fmt: skip
    _decode_kernel.run(requests * kv_heads * splits, tensors, strides, numbers, constants, num_warps=tiles.warps)
    if splits > 1:
        _merge_kernel.run(
            requests * heads,
            (parts, part_sums, out, sums, tokens.query_starts),
            (out.stride(0), *of_sums),
            (requests, splits),
            (heads, size, width, lse is not None, _FEW if splits <= _FEW else MOST_SPLITS),
            num_warps=4,
        )


def _parts(scratch: Tensor, rows: int, size: int) -> tuple[Tensor, Tensor]:
    floats = scratch[: 4 * rows * (size + 1)].view(torch.float32)
    return floats[: rows * size], floats[rows * size :]
