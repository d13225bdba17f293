"""Launches the kernel for one prompt in one piece whose warps have roles, on GPUs of compute capability 9.0."""

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
        key: ``(tokens, num_kv_heads, head_size)``.
        value: As `key`.
        out: As `query`.
        pattern: Which blocks a head attends.
    """
    block, local, *_ = pattern.constants
    are_local = local >= 2 or (local == 1 and block % (2 * _ROWS) == 0)
    tensors = (query, key, value, out)
    kinds = {tensor.dtype for tensor in tensors}
    fits = block % _ROWS == 0 and are_local and query.shape[2] in _SIZES
    fits = fits and kinds in ({torch.bfloat16}, {torch.float16})
    return fits and all(is_aligned(tensor) for tensor in tensors)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    pattern: Pattern,
    scales: Scales,
    tiles: HopperTiles,
) -> None:
    """
    Attend one prompt, whose keys are its own rows, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``, such as `is_for` takes.
        key: ``(tokens, num_kv_heads, head_size)``.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        pattern: Which blocks a head attends.
        scales: Of the layer.
        tiles: How it is computed.
    """
    from attnplug_blocksparse.gluon_prompt import described, prompt_kernel  # noqa: PLC0415 - where Gluon is

    length, heads, size = query.shape
    num_tiles = -(-length // (2 * _ROWS))
    items = num_tiles * heads
    tensors = (query if lse is None else lse,)
    strides = (0, 0) if lse is None else lse.stride()
    numbers = (length, num_tiles, items, scales.scores, *pattern.numbers)
    constants = (heads, heads // key.shape[1], size, *pattern.constants, lse is not None, tiles.stages)
    rows = [described(tensor) for tensor in (query, key, value, out)]
    programs = min(items, tiles.programs)
    prompt_kernel.run(programs, tensors, strides, numbers, constants, descriptors=rows, num_warps=4)
