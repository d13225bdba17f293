"""The tensors of a layer's KV cache by role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.errors import CacheError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnplug.contract import KVCache


@frozen(eq=False)
class Pages:
    """
    A quantized KV cache. Shapes are in the contract's order; in memory a page is heads-first.

    Attributes:
        keys: ``(num_blocks, block_size, num_kv_heads, head_size)`` int8.
        values: As `keys`; of the layer's dtype at level 2.
        key_scales: ``(num_blocks, num_kv_heads, block_size)`` float32.
        value_scales: ``(num_kv_heads, head_size)`` float32 at level 1, contiguous; None at level 2.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor | None

    @classmethod
    def of(cls, cache: KVCache) -> Pages:
        """Return the pages of a KV cache."""
        scales = cache.tensors.get("v_scale")
        return cls(cache.k, cache.v, cache["k_scale"], None if scales is None else scales.contiguous())


def of_planes(planes: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """
    Return the roles ``"k"`` and ``"v"`` of a level 2 cache in the layout of the vendor's engine, one allocation.

    The 16-bit values fill planes 1 and 2 one after the other: those of block b are not at index b of these planes.
    Copy and swap blocks through the returned views.

    Args:
        planes: ``(3, num_blocks, num_kv_heads, block_size, head_size)`` int8, contiguous: keys, then values.
        dtype: The dtype of the values, 16 bits.

    Raises:
        CacheError: `planes` has another shape, dtype or layout.
    """
    if planes.ndim != 5 or planes.shape[0] != 3 or planes.element_size() != 1 or not planes.is_contiguous():
        raise CacheError(
            f"a level 2 cache has the shape {tuple(planes.shape)}, {planes.dtype} and strides {planes.stride()}",
            "the shape is (3, num_blocks, num_kv_heads, block_size, head_size) int8, contiguous",
            "allocate that, or let LoadedBackend.make_cache allocate two tensors",
        )
    values = planes[1:].view(-1).view(dtype).view(planes.shape[1:])
    return {"k": planes[0].transpose(1, 2), "v": values.transpose(1, 2)}
