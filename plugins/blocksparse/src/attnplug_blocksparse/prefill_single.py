"""Launches the kernel whose warps have roles, for one prompt or one chunk, on GPUs of compute capability 9.0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from attnplug_blocksparse.prompt import is_aligned
from attnplug_blocksparse.triton_softmax import INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_blocksparse.pattern import Pattern
    from attnplug_blocksparse.scales import Scales
    from attnplug_blocksparse.tiles import HopperTiles

_TRITONS: Final = ((3, 6), (3, 7))
"""Releases whose Gluon, which is experimental, the kernel is compiled with in the tests."""

_SIZES: Final = (64, 128)
"""Head sizes whose rows swizzle, and whose sums of values leave room for queries in the registers of a warpgroup."""

_ROWS: Final = 64
"""Query rows of a warpgroup, and keys of a tile, as the kernel has them."""


def is_there() -> bool:
    """Whether this release of Triton compiles the kernel. The interpreter does not know it."""
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return not INTERPRETED and release in _TRITONS


def is_for(query: Tensor, key: Tensor, value: Tensor, out: Tensor, pattern: Pattern) -> bool:
    """
    Whether the kernel computes this.

    Blocks are as long as one or more tiles, and the diagonal of either warpgroup is local to both: of 128 rows that
    begin at a multiple of 128, the first half has to see its own keys in blocks that are local to the second half.

    Args:
        query: ``(tokens, num_q_heads, head_size)`` of all prompts.
        key: ``(tokens, num_kv_heads, head_size)``, or pages ``(num_blocks, page_size, num_kv_heads, head_size)``, of
            which one or more tiles make one.
        value: As `key`.
        out: As `query`.
        pattern: Which blocks a head attends.
    """
    block, local, *_ = pattern.constants
    are_local = local >= 2 or (local == 1 and block % (2 * _ROWS) == 0)
    tensors = (query, key, value, out)
    kinds = {tensor.dtype for tensor in tensors}
    fits = block % _ROWS == 0 and are_local and query.shape[2] in _SIZES
    fits = fits and kinds in ({torch.bfloat16}, {torch.float16}) and (key.ndim == 3 or key.shape[1] % _ROWS == 0)
    return fits and all(is_aligned(tensor) for tensor in tensors)


def attend(  # noqa: PLR0913 - tensors, how they are attended, and where keys in pages are
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    pattern: Pattern,
    scales: Scales,
    tiles: HopperTiles,
    *,
    table: Tensor | None = None,
    length: int | None = None,
) -> None:
    """
    Attend one prompt, whose keys are its own rows, or a chunk, whose keys are in pages, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``, such as `is_for` takes.
        key: ``(tokens, num_kv_heads, head_size)``, or ``(num_blocks, page_size, num_kv_heads, head_size)``.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        pattern: Which blocks a head attends.
        scales: Of the layer.
        tiles: How it is computed.
        table: ``(max_blocks,)`` int32, the pages of the sequence; None where keys are rows.
        length: Keys in pages, the chunk's own included.
    """
    from attnplug_blocksparse.gluon_prompt import described, prompt_kernel  # noqa: PLC0415 - where Gluon is

    rows, heads, size = query.shape
    length = rows if length is None else length
    context = length - rows
    last = (length - 1) // (2 * _ROWS)
    items = (last - context // (2 * _ROWS) + 1) * heads
    tensors = (query if lse is None else lse, query if table is None else table, out)
    strides = (out.stride(0), *((0, 0) if lse is None else lse.stride()))
    numbers = (context, length, last, items, scales.scores, *pattern.numbers)
    page_size = 0 if table is None else key.shape[1]
    constants = (
        heads, heads // key.shape[-2], size, *pattern.constants, page_size, lse is not None, tiles.stages,
    )  # fmt: skip
    descriptors = [described(tensor) for tensor in (query, key, value, out)]
    programs = min(items, tiles.programs)
    prompt_kernel.run(programs, tensors, strides, numbers, constants, descriptors=descriptors, num_warps=4)
