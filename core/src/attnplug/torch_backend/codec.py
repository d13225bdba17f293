"""What an FP8 KV cache does to keys and values: how they are rounded, and where their scales are applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract.inputs.kv_cache import is_narrow_float, torch_dtype
from attnplug.ops.quantize import dequantize, dequantize_latents, quantize, quantize_latents
from attnplug.request.domains import FP8_DS_MLA

if TYPE_CHECKING:
    from attnplug.contract.inputs.layer import Layer
    from attnplug.negotiation.agreement import Agreement

_LATENT: Final = 576
"""Elements of a latent in a record, with its rotary ones."""


@frozen(eq=False)
class Codec:
    """
    Scales of a layer whose KV cache is FP8: ``x ~ scale * quantized``.

    Kernels read the quantized numbers themselves, which every wider dtype holds exactly. A key's scale is a factor of
    its scores, a value's scale a factor of the output, so that neither rounds anything. Keys are multiplied only where
    heads have different scales, and for a kernel that is compiled for the factor of its scores.

    Attributes:
        narrow: Dtype of the KV cache.
        dtype: Dtype of the layer.
        key_scale: float32, one element or ``(num_kv_heads,)``; None for 1.
        value_scale: The same for values.
        score_factor: Factor of the scores.
        key_factor: ``(1 or num_kv_heads, 1)`` factor of keys after decoding; None for 1.
        output_factor: ``(1 or num_kv_heads, 1, 1)`` factor of outputs; None for 1.
    """

    narrow: torch.dtype
    dtype: torch.dtype
    key_scale: Tensor | None
    value_scale: Tensor | None
    score_factor: float
    key_factor: Tensor | None
    output_factor: Tensor | None

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return new keys and values as the KV cache holds them."""
        return quantize(key, self.narrow, self.key_scale), quantize(value, self.narrow, self.value_scale)

    def decode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return encoded rows ``(tokens, num_kv_heads, size)`` as kernels read them, in fresh memory."""
        rows = (key.contiguous(), value.contiguous())  # a layer's K/V may be a view with its heads first
        key, value = (dequantize(narrow, torch.empty_like(narrow, dtype=self.dtype)) for narrow in rows)
        return key if self.key_factor is None else key.mul_(self.key_factor), value

    def widen(self, encoded: Tensor, wide: Tensor) -> Tensor:
        """Write gathered bytes into `wide` as numbers of the layer's dtype, and return it; both are flat."""
        return dequantize(encoded.view(self.narrow), wide)

    def rows(self, gathered: Tensor) -> Tensor:
        """Return gathered bytes ``(slots, 1, size)`` as numbers, without their scale."""
        return gathered.view(self.narrow)

    def width(self, size: int) -> int:
        """Return the elements of a decoded row, of one with `size` elements in the KV cache."""
        return size


class Records(Codec):
    """Latents as records of fp8_ds_mla, which hold their own scales: no factor is left for scores and outputs."""

    def encode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records of new latents, and their codes."""
        records = quantize_latents(key)
        return records, records[..., : value.shape[2]]

    def decode(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents, and the part that is their value."""
        rows = key.new_empty(*key.shape[:2], _LATENT, dtype=self.dtype)
        dequantize_latents(key.contiguous(), rows)
        return rows, rows[..., : value.shape[2]]

    def widen(self, encoded: Tensor, wide: Tensor) -> Tensor:
        """Write gathered records into `wide` as latents."""
        dequantize_latents(encoded, wide.view(-1, _LATENT))
        return wide

    def rows(self, gathered: Tensor) -> Tensor:
        """Return gathered records ``(slots, 1, 656)`` as latents."""
        return dequantize_latents(gathered, gathered.new_empty(*gathered.shape[:2], _LATENT, dtype=self.dtype))

    def width(self, size: int) -> int:
        """Return the elements of a latent."""
        del size
        return _LATENT


def codec_of(layer: Layer, agreement: Agreement) -> Codec | None:
    """Return the codec of a completed layer; None where its KV cache is not FP8."""
    narrow = torch_dtype(agreement.kv_cache_dtype)
    if agreement.kv_cache_dtype == FP8_DS_MLA:
        return Records(narrow, torch_dtype(agreement.requirements.dtype), None, None, 1.0, None, None)
    if not is_narrow_float(narrow):
        return None
    key_scale = None if layer.k_scale == 1.0 else layer.k_scale_tensor
    value_scale = None if layer.v_scale == 1.0 else layer.v_scale_tensor
    scales_scores = layer.k_scale is not None and agreement.variant != "flex"
    return Codec(
        narrow,
        torch_dtype(agreement.requirements.dtype),
        key_scale,
        value_scale,
        score_factor=layer.k_scale if scales_scores and layer.k_scale is not None else 1.0,
        key_factor=None if scales_scores or key_scale is None else key_scale.view(-1, 1),
        output_factor=None if value_scale is None else value_scale.view(-1, 1, 1),
    )
