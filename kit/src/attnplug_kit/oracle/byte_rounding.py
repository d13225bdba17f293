"""What an int8 cache makes of queries, keys and values, written to be checked by reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.ops import key_and_value_pages

if TYPE_CHECKING:
    from attnplug.contract import Cache

BYTES: Final = ("int8", "int8_k")
"""The cache dtypes of this module: values in int8 too, and values of the layer's dtype."""

_CLIPPED: Final = 0.9
"""Part of the largest value that the scales reach: some values are beyond them, as after any calibration."""


@frozen(eq=False)
class ByteRounding:
    """
    Symmetric int8: ``x ~ scale * quantized``, quantized from -127 to 127. Queries and keys have a scale per token and
    head, which follows from the row; values one per head and channel, which is fixed.

    A cache of it is a mapping: beside ``"kv"``, or ``"k"`` and ``"v"``, there are ``"k_scale"``, ``(num_blocks,
    num_kv_heads, block_size)`` float32, and for int8 values ``"v_scale"``, ``(num_kv_heads, head_size)`` float32.

    Attributes:
        value_scales: ``(num_kv_heads, head_size)`` float32; None where values are cached as they are.
    """

    value_scales: Tensor | None

    def rows(self, rows: Tensor) -> Tensor:
        """Return what attention sees of queries or keys ``(tokens, heads, size)``, in float64."""
        quantized, scales = by_row(rows)
        return quantized * scales[..., None].double()

    def values(self, rows: Tensor) -> Tensor:
        """Return what attention sees of values ``(tokens, num_kv_heads, size)``."""
        scales = self.value_scales
        return rows if scales is None else by_channel(rows, scales) * scales.double()

    def fill(self, cache: Cache, places: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """
        Put rows, as they come, into a cache, and the value scales.

        Args:
            cache: As above.
            places: ``(tokens,)`` block and slot of each.
            keys: ``(tokens, num_kv_heads, size)``.
            values: Likewise.
        """
        tensors, (quantized, scales) = paged_tensors(cache), by_row(keys)
        held = values if self.value_scales is None else by_channel(values, self.value_scales)
        for name, rows in (("key", quantized), ("value", held), ("key scale", scales)):
            tensors[name][places] = rows.to(tensors[name])
        if self.value_scales is not None and isinstance(cache, Mapping):
            cache["v_scale"].copy_(self.value_scales)


def rounding_for(kv_cache_dtype: str, values: tuple[Tensor, ...]) -> ByteRounding | None:
    """Return the rounding of a cache dtype, with scales for the values; None for other dtypes."""
    if kv_cache_dtype not in BYTES:
        return None
    if kv_cache_dtype == "int8_k":
        return ByteRounding(None)
    return ByteRounding(torch.cat(values).float().abs().amax(0).clamp(min=1e-3) * _CLIPPED / 127)


def by_row(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``(quantized, scales)``: whole numbers in float64, and ``(tokens, heads)`` float32. Both are found in float32."""
    largest = rows.float().abs().amax(-1)
    scales = torch.where(largest > 0, largest, 1.0) / 127
    return (rows.float() / scales[..., None]).round().clamp(-127, 127).double(), scales


def by_channel(rows: Tensor, scales: Tensor) -> Tensor:
    """Return rows ``(tokens, num_kv_heads, size)`` as whole numbers in float64, by scales ``(num_kv_heads, size)``."""
    return (rows.float() / scales).round().clamp(-127, 127).double()


def paged_tensors(cache: Cache) -> dict[str, Tensor]:
    """Return what a cache holds per token, by name: views ``(num_blocks, block_size, ...)``."""
    keys, values = key_and_value_pages(cache)
    found = {"key": keys, "value": values}
    if isinstance(cache, Mapping) and "k_scale" in cache:
        found["key scale"] = cache["k_scale"].transpose(1, 2)
    return found
