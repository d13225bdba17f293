"""
What a quantized KV cache makes of queries, keys and values, short enough to be verified by reading.

FP8: to the nearest number of the dtype. Records of latents: to FP8 too, with a scale per 128 elements. Int8:
symmetric, with a scale per row or per channel. Per token and head: int8 or FP8, with a scale per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import is_narrow_float, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Collection

    from attnplug.contract import KVCache, LoadedBackend
    from attnplug_kit.oracle.case import Case

INT8_DTYPES: Final = ("int8", "int8_k")
"""The int8 cache dtypes: with values in int8 too, and with values of the layer's dtype."""

PER_TOKEN_HEAD: Final = ("int8_per_token_head", "fp8_per_token_head")
"""The cache dtypes of codes with a scale per token and head, of keys and of values."""

ROW_DTYPES: Final = (*INT8_DTYPES, *PER_TOKEN_HEAD)
"""The cache dtypes whose keys have a scale per token and head, which follows from the key."""

RECORD: Final = "fp8_ds_mla"
"""The cache dtype of records of latents."""

_CALIBRATED: Final = 0.9
"""Part of the largest value that the value scales reach: a calibration leaves outliers, which are clipped."""

_NUMBERS: Final = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}
"""Bits behind the point, the smallest exponent and the largest number: OCP 8-bit floating point, revision 1.0."""

_QUERY_SCALE: Final = 0.5
"""Of quantized queries. It is a power of two, and the queries are numbers of the cache's dtype: no bit is lost."""


@frozen(eq=False)
class Fp8Rounding:
    """
    An FP8 cache dtype and the scales of a layer.

    Attributes:
        dtype: float8_e4m3fn or float8_e5m2.
        key_scale: float32, ``(1,)`` or ``(num_kv_heads,)``.
        value_scale: As `key_scale`, of values; the same object for latents.
    """

    dtype: torch.dtype
    key_scale: Tensor
    value_scale: Tensor

    def cached(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers that the cache holds of rows ``(tokens, num_kv_heads, size)``, in float64."""
        return nearest((rows.float() / scale[:, None]).double(), self.dtype)

    def seen(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return what attention reads of such rows, in float64."""
        return self.cached(rows, scale) * scale[:, None].double()

    def scaled(self, key: float = 1.0, value: float = 1.0) -> Fp8Rounding:
        """Return the rounding with its scales multiplied. Of latents there is one, which takes both factors."""
        if self.value_scale is self.key_scale:
            scale = self.key_scale * key * value
            return Fp8Rounding(self.dtype, scale, scale)
        return Fp8Rounding(self.dtype, self.key_scale * key, self.value_scale * value)


class RecordRounding(Fp8Rounding):
    """
    Records of 656 bytes: 512 float8_e4m3 codes, 4 float32 scales, 64 bfloat16 rotary elements.

    A scale is the largest magnitude among its 128 elements, divided by 448. The scales of the layer are not read.
    """

    def cached(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return the records of latents ``(tokens, 1, 576)``, bytes ``(tokens, 1, 656)``."""
        del scale
        scales, codes = self._split(rows)
        parts = (codes.flatten(2).to(self.dtype), scales.flatten(2), rows[..., 512:])
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)

    def seen(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers of records of latents, or of their first 512 elements, in float64."""
        del scale
        scales, codes = self._split(rows)
        return torch.cat([(codes * scales.double()).flatten(2), rows[..., 512:].double()], -1)

    def scaled(self, key: float = 1.0, value: float = 1.0) -> Fp8Rounding:
        """Return the rounding itself: scales follow from the latents."""
        del key, value
        return self

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales ``(tokens, 1, 4, 1)`` float32, and numbers of FP8 ``(tokens, 1, 4, 128)`` float64."""
        tiles = torch.unflatten(rows[..., :512].float(), -1, (4, 128))
        scales = (tiles.abs().amax(-1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
        return scales, nearest((tiles / scales).double(), self.dtype)


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Return the nearest finite number of a dtype for each value, in float64; NaN stays NaN.

    Ties go to the even code. Values beyond the largest number become that number.

    Args:
        values: Of any shape, in float64.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    bits, smallest, largest = _NUMBERS[dtype]
    _, exponent = torch.frexp(values)  # values are 0.5 to 1 times 2 ** exponent
    step = torch.ldexp(torch.ones_like(values), (exponent - 1).clamp(min=smallest) - bits)
    return ((values / step).round() * step + 0.0).clamp(-largest, largest)  # -0 becomes 0


def fp8_rounding(case: Case) -> Fp8Rounding | None:
    """Return the FP8 rounding of a case, with the scales that its layer has; None for another cache dtype."""
    if case.kv_cache_dtype == RECORD:
        return RecordRounding(torch.float8_e4m3fn, torch.ones(1), torch.ones(1))
    dtype = _fp8_dtype(case)
    if dtype is None:
        return None
    heads = case.num_kv_heads if case.per_head_scales else 1
    spread = torch.linspace(0.5, 1.5, heads) if heads > 1 else torch.ones(1)
    key_scale = case.k_scale * spread
    return Fp8Rounding(dtype, key_scale, key_scale if case.latent else case.v_scale * spread.flip(0))


def representable(case: Case, queries: Tensor) -> Tensor:
    """Return queries that the case's cache could hold too: some kernels read queries and keys of one dtype only."""
    dtype = _fp8_dtype(case)
    return queries if dtype is None else nearest(queries.double(), dtype)


def _fp8_dtype(case: Case) -> torch.dtype | None:
    if case.kv_cache_dtype in ROW_DTYPES:
        return None
    dtype = torch_dtype(case.requirements().kv_cache_dtype)  # the canonical name
    return dtype if is_narrow_float(dtype) else None


def scales_of(
    rounding: Fp8Rounding | None, names: Collection[str], device: torch.device | str, *, per_head: bool
) -> dict[str, Any]:
    """
    Return the scales of an FP8 cache as the fields of a layer. A host gives scales as tensors or as numbers: those of
    keys are tensors here, the others numbers where one is enough.

    Args:
        rounding: What the cache makes of keys and values; None has no scales, and neither has a layer with records.
        names: The scales that a quantized cache has, as `AttentionImpl.static_scales` says.
        device: The device of the tensors.
        per_head: Whether each KV head has its own scale.
    """
    if rounding is None or isinstance(rounding, RecordRounding):
        return {}
    found: dict[str, Any] = {"k_scale_tensor": rounding.key_scale.to(device)}
    if per_head:
        found["v_scale_tensor"] = rounding.value_scale.to(device)
    elif rounding.value_scale is not rounding.key_scale:  # of latents it is one scale, which the layer's keys have
        found["v_scale"] = float(rounding.value_scale)
    if "q" in names:
        found |= {"q_scale_tensor": _by_head(rounding).to(device)} if per_head else {"q_scale": _QUERY_SCALE}
    return found


def as_host_gives(query: Tensor, backend: LoadedBackend, rounding: Fp8Rounding | None) -> Tensor:
    """
    Return queries as a host passes them: in the dtype of an FP8 cache, if the backend leaves their quantization to it.

    Args:
        query: ``(tokens, num_q_heads, head_size)``, in the layer's dtype.
        backend: The backend.
        rounding: What its cache makes of keys and values.
    """
    impl = backend.impl_class
    if rounding is None or isinstance(rounding, RecordRounding) or impl.query_quantization != "host":
        return query
    scale = torch.tensor([_QUERY_SCALE if "q" in impl.static_scales else 1.0])
    if "q" in impl.static_scales and backend.agreement.requirements.per_head_scales:
        scale = _by_head(rounding)
    by_head = scale.repeat_interleave(query.shape[1] // len(scale)).unsqueeze(1)
    return (query.float() / by_head.to(query.device)).to(rounding.dtype)


def _by_head(rounding: Fp8Rounding) -> Tensor:
    heads = torch.arange(len(rounding.key_scale), dtype=torch.float32)
    return torch.pow(_QUERY_SCALE, 1 + heads % 3)


@frozen(eq=False)
class Int8Rounding:
    """
    Symmetric int8: ``x ~ scale * quantized``, quantized from -127 to 127.

    Queries and keys have a scale per token and head, which follows from the row. Values have one per head and channel,
    which is fixed.

    Beside keys and values, its cache has the role ``"k_scale"``, ``(num_blocks, num_kv_heads, block_size)`` float32,
    and for int8 values ``"v_scale"``, ``(num_kv_heads, head_size)`` float32.

    Attributes:
        value_scales: ``(num_kv_heads, head_size)`` float32; None where values are cached in the layer's dtype.
    """

    value_scales: Tensor | None

    @property
    def has_byte_weights(self) -> bool:
        """Whether kernels may round the softmax weights to int8 too."""
        return self.value_scales is not None

    def queries(self, rows: Tensor) -> Tensor:
        """Return what attention reads of queries ``(tokens, num_q_heads, size)``."""
        return self.keys(rows)

    def keys(self, rows: Tensor) -> Tensor:
        """Return what attention reads of keys ``(tokens, num_kv_heads, size)``, in float64."""
        quantized, scales = by_row(rows)
        return quantized * scales[..., None].double()

    def values(self, rows: Tensor) -> Tensor:
        """Return what attention reads of values ``(tokens, num_kv_heads, size)``."""
        scales = self.value_scales
        return rows if scales is None else by_channel(rows, scales) * scales.double()

    def fill(self, cache: KVCache, places: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """
        Write rows and the value scales into a cache.

        Args:
            cache: As above.
            places: ``(tokens,)`` block and offset of each.
            keys: ``(tokens, num_kv_heads, size)``, not quantized.
            values: As `keys`.
        """
        tensors, (quantized, scales) = paged_tensors(cache), by_row(keys)
        held = values if self.value_scales is None else by_channel(values, self.value_scales)
        for name, rows in (("key", quantized), ("value", held), ("key scale", scales)):
            tensors[name][places] = rows.to(tensors[name])
        if self.value_scales is not None:
            cache["v_scale"].copy_(self.value_scales)


@frozen(eq=False)
class RowRounding(Int8Rounding):
    """
    Int8 or float8_e4m3 with a scale per token and head, which follows from the row, of keys and of values.

    Neither queries nor softmax weights are rounded. The cache has the roles ``"k_scale"`` and ``"v_scale"``,
    ``(num_blocks, num_kv_heads, block_size)`` float32.

    Attributes:
        dtype: int8 or float8_e4m3fn.
    """

    dtype: torch.dtype

    def queries(self, rows: Tensor) -> Tensor:
        """Return the queries themselves."""
        return rows

    def keys(self, rows: Tensor) -> Tensor:
        """Return what attention reads of keys or values ``(tokens, num_kv_heads, size)``, in float64."""
        quantized, scales = by_row(rows, self.dtype)
        return quantized * scales[..., None].double()

    def values(self, rows: Tensor) -> Tensor:
        """Return what attention reads of values, as of keys."""
        return self.keys(rows)

    def fill(self, cache: KVCache, places: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Write rows and their scales into a cache, as `Int8Rounding.fill`."""
        tensors = paged_tensors(cache)
        for name, rows in (("key", keys), ("value", values)):
            quantized, scales = by_row(rows, self.dtype)
            codes, held = quantized.to(self.dtype), tensors[name]
            held.view(torch.int8)[places] = codes.view(torch.int8).to(held.device)  # torch places no narrow floats
            tensors[f"{name} scale"][places] = scales.to(held.device)


def int8_rounding(kv_cache_dtype: str, values: tuple[Tensor, ...]) -> Int8Rounding | None:
    """Return the rounding of a cache dtype with scales per row, and scales for the values; None for other dtypes."""
    if kv_cache_dtype in PER_TOKEN_HEAD:
        return RowRounding(None, torch_dtype(kv_cache_dtype))
    if kv_cache_dtype not in INT8_DTYPES:
        return None
    if kv_cache_dtype == "int8_k":
        return Int8Rounding(None)
    return Int8Rounding(torch.cat(values).float().abs().amax(0).clamp(min=1e-3) * _CALIBRATED / 127)


def by_row(rows: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """
    Return numbers of int8 or float8_e4m3fn in float64, and scales ``(tokens, heads)`` float32.

    Both are computed in float32.
    """
    largest, most = rows.float().abs().amax(-1), 127 if dtype == torch.int8 else 448
    scales = torch.where(largest > 0, largest, 1.0) / most
    scaled = rows.float() / scales[..., None]
    return scaled.round().clamp(-127, 127).double() if most == 127 else nearest(scaled.double(), dtype), scales


def by_channel(rows: Tensor, scales: Tensor) -> Tensor:
    """Return rows ``(tokens, num_kv_heads, size)`` as whole numbers in float64, by scales ``(num_kv_heads, size)``."""
    return (rows.float() / scales).round().clamp(-127, 127).double()


def paged_tensors(cache: KVCache) -> dict[str, Tensor]:
    """Return what a cache holds per token, by name: views ``(num_blocks, block_size, ...)``."""
    found = {"key": cache.k, "value": cache.v}
    if "k_scale" in cache:
        found["key scale"] = cache["k_scale"].transpose(1, 2)
    if "v_scale" in cache and cache["v_scale"].ndim == 3:  # calibrated ones are of no token
        found["value scale"] = cache["v_scale"].transpose(1, 2)
    return found


def as_bytes(pages: Tensor) -> Tensor:
    """Return the bytes of pages, by which NaN equals NaN. An axis of one head may have any stride."""
    return pages.contiguous().view(-1).view(torch.uint8).view(*pages.shape[:-1], -1)
