"""Rounds rows to FP8 and back, ``x ~ scale * quantized``, and latents to records of fp8_ds_mla."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from attnplug.ops.triton import triton_function
from attnplug.request.domains import FP8_DS_MLA_BYTES

_TILE: Final = 128
"""Elements of a latent that have one scale in a record."""

_CODES: Final = 512
_SCALES_END: Final = _CODES + _CODES // _TILE * 4
"""The first byte of the rotary elements of a record, behind its codes and scales."""

_WIDE: Final = {2: torch.int32, 4: torch.int64}


def quantize(rows: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """
    Return rows in FP8, divided by their scale.

    Values saturate at the largest number of the dtype, where a plain conversion gives NaN or infinity. NaN stays NaN.

    Args:
        rows: ``(tokens, num_kv_heads, size)``.
        dtype: float8_e4m3fn or float8_e5m2.
        scale: float32, one element or ``(num_kv_heads,)``; None is 1. It is a tensor, since devices divide inexactly by
            Python numbers.
    """
    limit = torch.finfo(dtype).max
    rows = rows.float()
    if scale is not None:
        rows = rows / scale.view(-1, 1)
    return rows.clamp(-limit, limit).to(dtype)


def quantize_queries(queries: Tensor, scale: Tensor) -> Tensor:
    """
    Return queries in float8_e4m3fn, as `quantize` does, for kernels that read queries and keys of one dtype. One launch
    where Triton works.

    Args:
        queries: ``(tokens, num_q_heads, head_size)``, of any strides.
        scale: float32, one element, or one per KV head for the query heads that read it.
    """
    launch = triton_function("attnplug.ops.triton_quantize", "quantize") if queries.is_cuda else None
    if launch is not None:
        out = torch.empty(queries.shape, dtype=torch.float8_e4m3fn, device=queries.device)
        if launch(queries, scale, out):
            return out
    count, heads, size = queries.shape
    grouped = queries.reshape(count, scale.numel(), heads // scale.numel() * size)
    return quantize(grouped, torch.float8_e4m3fn, scale).view(queries.shape)


def dequantize(narrow: Tensor, out: Tensor) -> Tensor:
    """
    Write FP8 numbers into `out`, without a scale, and return it. Every wider float holds them exactly.

    Args:
        narrow: Contiguous, in float8_e4m3fn or float8_e5m2.
        out: Contiguous, of the same shape, in float32, bfloat16 or float16.
    """
    sizes = (narrow.numel(), narrow.storage_offset(), out.storage_offset())
    if narrow.device.type != "cpu" or any(size % 2 for size in sizes):
        return out.copy_(narrow)
    # On the CPU, a look-up of two numbers at once takes a tenth of the time of torch's conversion.
    table = _pairs(narrow.dtype, out.dtype)
    codes = narrow.view(-1).view(torch.int16).int().bitwise_and_(0xFFFF)
    torch.index_select(table, 0, codes, out=out.view(-1).view(table.dtype))
    return out


def quantize_latents(rows: Tensor) -> Tensor:
    """
    Return latents as records of fp8_ds_mla.

    The scale of 128 elements is their largest magnitude divided by 448, and at least the smallest normal float32.

    Source: ``concat_and_cache_ds_mla`` of vLLM 0.26.

    Args:
        rows: ``(tokens, 1, 576)`` bfloat16: 512 elements and 64 rotary ones.

    Returns:
        ``(tokens, 1, 656)`` uint8.
    """
    tokens = rows.shape[0]
    tiles = torch.unflatten(rows[..., :_CODES].float(), -1, (-1, _TILE))
    scales = tiles.abs().amax(-1) / torch.full((), 448.0, device=rows.device)
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    codes = (tiles / scales.unsqueeze(-1)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    parts = (codes.flatten(2), scales, rows[..., _CODES:])
    return torch.cat([one.contiguous().view(torch.uint8).view(tokens, 1, -1) for one in parts], dim=-1)


def dequantize_latents(records: Tensor, out: Tensor) -> Tensor:
    """
    Write the latents of records of fp8_ds_mla into `out`, rounded once, and return it.

    Args:
        records: uint8, contiguous, ``(..., 656)``, at an address that 4 divides.
        out: ``(..., 576)`` bfloat16, contiguous.
    """
    rows, wide = records.view(-1, FP8_DS_MLA_BYTES), out.view(-1, out.shape[-1])
    scales = rows[:, _CODES:_SCALES_END].view(torch.float32)
    tiles = torch.unflatten(rows[:, :_CODES].view(torch.float8_e4m3fn).float(), 1, (-1, _TILE))
    torch.unflatten(wide[:, :_CODES], 1, (-1, _TILE)).copy_(tiles.mul_(scales.unsqueeze(-1)))
    wide[:, _CODES:].copy_(rows[:, _SCALES_END:].view(torch.bfloat16))
    return out


@cache
def _pairs(narrow: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return the two numbers of each pair of codes, as ``(65536,)`` integers with the bits of both."""
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return codes.view(torch.uint8).view(narrow).to(dtype).view(_WIDE[dtype.itemsize])
