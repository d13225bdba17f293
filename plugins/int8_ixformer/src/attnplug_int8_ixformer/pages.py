"""The tensors of a layer's cache, by what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor


@frozen(eq=False)
class Pages:
    """
    A quantized cache. Axes are in the contract's order; in memory the heads of a page come first.

    Attributes:
        keys: ``(num_blocks, block_size, num_kv_heads, head_size)`` int8.
        values: The same; of the layer's dtype at level 2.
        key_scales: ``(num_blocks, num_kv_heads, block_size)`` float32.
        value_scales: ``(num_kv_heads, head_size)`` float32 at level 1, contiguous; else None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor | None

    @classmethod
    def of(cls, cache: Mapping[str, Tensor]) -> Pages:
        """Return the pages of a cache that `Backend.make_cache` has made."""
        both, scales = cache.get("kv"), cache.get("v_scale")
        keys, values = (cache["k"], cache["v"]) if both is None else both.unbind(0)
        return cls(keys, values, cache["k_scale"], None if scales is None else scales.contiguous())


def of_planes(planes: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """
    Return the roles ``"k"`` and ``"v"`` of a level 2 cache that is one allocation, as the vendor's engine lays it out.

    Values of block b are not at index b of the planes: two bytes each, they take both planes one after another. So
    blocks are moved through these views.

    Args:
        planes: ``(3, num_blocks, num_kv_heads, block_size, head_size)`` int8, contiguous: keys, then values.
        dtype: Of the values, 16 bits.

    Raises:
        CacheError: It has another form.
    """
    if planes.ndim != 5 or planes.shape[0] != 3 or planes.element_size() != 1 or not planes.is_contiguous():
        raise CacheError(
            f"a level 2 cache of shape {tuple(planes.shape)}, {planes.dtype} and strides {planes.stride()} was given",
            "it is (3, num_blocks, num_kv_heads, block_size, head_size) int8, contiguous",
            "allocate it so, or let Backend.make_cache allocate two tensors",
        )
    values = planes[1:].view(-1).view(dtype).view(planes.shape[1:])
    return {"k": planes[0].transpose(1, 2), "v": values.transpose(1, 2)}
