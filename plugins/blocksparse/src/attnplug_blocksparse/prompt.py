"""Launches the kernel for prompts in one piece, one after another, on GPUs that load tiles by descriptors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.tools.tensor_descriptor import TensorDescriptor

from attnplug.ops import Kernel
from attnplug_blocksparse.triton_prompt import _prompt
from attnplug_blocksparse.triton_softmax import INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_blocksparse.pattern import Pattern
    from attnplug_blocksparse.scales import Scales
    from attnplug_blocksparse.tiles import PrefillTiles

_prompt_kernel = Kernel(_prompt)

_ALIGNMENT = 16
"""Bytes that addresses and strides of a descriptor are multiples of."""


def is_aligned(rows: Tensor) -> bool:
    """
    Whether a descriptor can describe rows: addresses and strides are multiples of 16 bytes, and numbers are neighbors.

    Args:
        rows: ``(..., heads, head_size)``.
    """
    strides = (stride * rows.element_size() % _ALIGNMENT == 0 for stride in rows.stride()[:-1])
    return rows.stride(-1) == 1 and rows.data_ptr() % _ALIGNMENT == 0 and all(strides)


def is_for(key: Tensor, value: Tensor, pattern: Pattern, tiles: PrefillTiles) -> bool:
    """
    Whether descriptors can describe these keys and blocks.

    Args:
        key: ``(tokens, num_kv_heads, head_size)`` of all prompts.
        value: As `key`.
        pattern: Which blocks a head attends.
        tiles: How it is to be computed.
    """
    block, size = pattern.constants[0], key.shape[2]
    fits = tiles.keys % block == 0 or block % tiles.keys == 0
    fits = fits and block & (block - 1) == 0 and block <= 256 and size & (size - 1) == 0
    return fits and all(is_aligned(rows) for rows in (key, value))


def attend(
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
    Attend one prompt, whose keys are its own rows, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        key: ``(tokens, num_kv_heads, head_size)``, such as `is_for` takes.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``, heads side by side.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        pattern: Which blocks a head attends.
        scales: Of the layer.
        tiles: How it is computed.
    """
    length, heads, size = query.shape
    block, _, stride, _ = pattern.constants
    supers = length // (block * stride)
    num_tiles = -(-length // tiles.rows)
    described = (
        _rows(key, tiles.keys), _rows(value, tiles.keys), _blocks(key, block, stride, tiles.keys),
        _blocks(value, block, stride, tiles.keys),
    )  # fmt: skip
    tensors = (query, out, query if lse is None else lse)
    strides = (*query.stride()[:2], out.stride(0), *((0, 0) if lse is None else lse.stride()))
    numbers = (length, num_tiles, supers, scales.scores, *pattern.numbers)
    constants = (
        heads, heads // key.shape[1], size, *pattern.constants, lse is not None, tiles.rows, tiles.keys, tiles.stages,
        INTERPRETED,
    )  # fmt: skip
    _prompt_kernel.run(num_tiles * heads, tensors, strides, numbers, constants, descriptors=described, **tiles.options)


def _rows(rows: Tensor, keys: int) -> Any:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [keys, 1, rows.shape[2]])


def _blocks(rows: Tensor, block: int, stride: int, keys: int) -> Any:
    """Blocks of equal residue side by side. Where there is no whole round, none is loaded."""
    (tokens, heads, size), (of_token, of_head, one) = rows.shape, rows.stride()
    shape = [max(1, tokens // (block * stride)), stride, block, heads, size]
    strides = [of_token * block * stride, of_token * block, of_token, of_head, one]
    return TensorDescriptor(rows, shape, strides, [max(1, keys // block), 1, block, 1, size])
