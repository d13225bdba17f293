"""
Launches a prefill of one request, by one of two kernels that load tiles through TMA descriptors.

`attend_tma` runs a Triton kernel on contiguous K/V. `attend_specialized` runs the warp-specialized Gluon kernel for
compute capability 9.0, on contiguous or paged K/V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from attnplug.ops import Kernel
from attnplug_blocksparse.triton_ops import INTERPRETED
from attnplug_blocksparse.triton_prefill_tma import _prefill_tma

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_blocksparse.pattern import Pattern
    from attnplug_blocksparse.plan import Scales
    from attnplug_blocksparse.tiles import HopperTiles, PrefillTiles

_ALIGNMENT: Final = 16
"""Bytes that a TMA descriptor's address and strides are multiples of."""

_GLUON_RELEASES: Final = ((3, 6), (3, 7))
"""The Triton releases whose Gluon, which is experimental, the tests compile the kernel with."""

_HEAD_SIZES: Final = (64, 128)
"""Head sizes of the warp-specialized kernel: rows swizzle, and the accumulator leaves registers for the queries."""

_ROWS: Final = 64
"""Query rows of a warpgroup, and keys of a tile, in the warp-specialized kernel."""

_prefill_tma_kernel = Kernel(_prefill_tma)


def _is_aligned(rows: Tensor) -> bool:
    """Whether a descriptor can describe ``(..., heads, head_size)``: the last stride is 1, the others are aligned."""
    strides = (stride * rows.element_size() % _ALIGNMENT == 0 for stride in rows.stride()[:-1])
    return rows.stride(-1) == 1 and rows.data_ptr() % _ALIGNMENT == 0 and all(strides)


# --- Triton, TMA descriptors ------------------------------------------------------------------------------------------


def supports_tma(key: Tensor, value: Tensor, pattern: Pattern, tiles: PrefillTiles) -> bool:
    """
    Return whether `attend_tma` supports these keys and blocks.

    Args:
        key: ``(tokens, num_kv_heads, head_size)`` of all requests.
        value: As `key`.
        pattern: The pattern.
        tiles: The tile sizes.
    """
    block, size = pattern.constants[0], key.shape[2]
    fits = tiles.keys % block == 0 or block % tiles.keys == 0
    fits = fits and block & (block - 1) == 0 and block <= 256 and size & (size - 1) == 0
    return fits and all(_is_aligned(rows) for rows in (key, value))


def attend_tma(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    pattern: Pattern,
    scales: Scales,
    tiles: PrefillTiles,
) -> None:
    """
    Compute attention of one request whose keys are its own rows, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        key: ``(tokens, num_kv_heads, head_size)``, supported by `supports_tma`.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``, heads contiguous.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        pattern: The pattern.
        scales: The layer's scales.
        tiles: The tile sizes.
    """
    length, heads, size = query.shape
    block, _, stride, _ = pattern.constants
    rounds = length // (block * stride)
    num_tiles = -(-length // tiles.rows)
    descriptors = (
        _describe_rows(key, tiles.keys), _describe_rows(value, tiles.keys),
        _describe_blocks(key, block, stride, tiles.keys), _describe_blocks(value, block, stride, tiles.keys),
    )  # fmt: skip
    tensors = (query, out, query if lse is None else lse)
    strides = (*query.stride()[:2], out.stride(0), *((0, 0) if lse is None else lse.stride()))
    scalars = (length, num_tiles, rounds, scales.softmax, *pattern.scalars)
    constants = (
        heads, heads // key.shape[1], size, *pattern.constants, lse is not None, tiles.rows, tiles.keys, tiles.stages,
        INTERPRETED,
    )  # fmt: skip
    programs = num_tiles * heads
    _prefill_tma_kernel.run(programs, tensors, strides, scalars, constants, descriptors=descriptors, **tiles.options)


def _describe_rows(rows: Tensor, keys: int) -> Any:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, 1, rows.shape[2]])


def _describe_blocks(rows: Tensor, block: int, stride: int, keys: int) -> Any:
    """Describe ``(rounds, vert_stride, block, heads, size)``, where the vertical blocks of a head are neighbors."""
    (tokens, heads, size), (token_stride, head_stride, one) = rows.shape, rows.stride()
    shape = [max(1, tokens // (block * stride)), stride, block, heads, size]  # without a whole round nothing is loaded
    strides = [token_stride * block * stride, token_stride * block, token_stride, head_stride, one]
    return TensorDescriptor(rows, shape, strides, [max(1, keys // block), 1, block, 1, size])


# --- Gluon, warp specialization ---------------------------------------------------------------------------------------


def has_specialized_kernel() -> bool:
    """Return whether this release of Triton compiles the warp-specialized kernel. The interpreter does not run it."""
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return not INTERPRETED and release in _GLUON_RELEASES


def supports_specialized(query: Tensor, key: Tensor, value: Tensor, out: Tensor, pattern: Pattern) -> bool:
    """
    Return whether `attend_specialized` supports these tensors and blocks.

    A block is one or more tiles, and the diagonal of either warpgroup is local to both: of 128 rows that begin at a
    multiple of 128, the keys of the first half are in blocks that are local to the second half too.

    Args:
        query: ``(tokens, num_q_heads, head_size)`` of all requests.
        key: ``(tokens, num_kv_heads, head_size)``, or the KV cache ``(num_blocks, page_size, num_kv_heads, head_size)``
            with pages of one or more tiles.
        value: As `key`.
        out: As `query`.
        pattern: The pattern.
    """
    block, local, *_ = pattern.constants
    are_local = local >= 2 or (local == 1 and block % (2 * _ROWS) == 0)
    tensors = (query, key, value, out)
    dtypes = {tensor.dtype for tensor in tensors}
    fits = block % _ROWS == 0 and are_local and query.shape[2] in _HEAD_SIZES
    fits = fits and dtypes in ({torch.bfloat16}, {torch.float16}) and (key.ndim == 3 or key.shape[1] % _ROWS == 0)
    return fits and all(_is_aligned(tensor) for tensor in tensors)


def attend_specialized(  # noqa: PLR0913 - tensors, their pattern and scales, and the pages of the keys
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
    Compute attention of one request, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``, supported by `supports_specialized`.
        key: ``(tokens, num_kv_heads, head_size)``: the request's own rows; or the KV cache
            ``(num_blocks, page_size, num_kv_heads, head_size)``.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        pattern: The pattern.
        scales: The layer's scales.
        tiles: The tile sizes.
        table: ``(max_blocks,)`` int32, the pages of the request; None for contiguous K/V.
        length: Keys of the request with paged K/V, those of this step included.
    """
    from attnplug_blocksparse.gluon_prefill import describe, prefill_kernel  # noqa: PLC0415 - needs Gluon

    rows, heads, size = query.shape
    length = rows if length is None else length
    context = length - rows
    last = (length - 1) // (2 * _ROWS)
    items = (last - context // (2 * _ROWS) + 1) * heads
    tensors = (query if lse is None else lse, query if table is None else table, out)
    strides = (out.stride(0), *((0, 0) if lse is None else lse.stride()))
    scalars = (context, length, last, items, scales.softmax, *pattern.scalars)
    page_size = 0 if table is None else key.shape[1]
    constants = (
        heads, heads // key.shape[-2], size, *pattern.constants, page_size, lse is not None, tiles.stages,
    )  # fmt: skip
    descriptors = [describe(tensor) for tensor in (query, key, value, out)]
    programs = min(items, tiles.programs)
    prefill_kernel.run(programs, tensors, strides, scalars, constants, descriptors=descriptors, num_warps=4)
