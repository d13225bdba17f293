"""Rounds rows to 8-bit floats and back: ``x ~ scale * quantized``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from attnplug.ops.triton import triton_works

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDE: Final = {2: torch.int32, 4: torch.int64}


def quantize(rows: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """
    Return rows in an 8-bit float, divided by their scale.

    What is too large becomes the largest number of the dtype, which a plain conversion would make NaN or infinite. NaN
    stays NaN.

    Args:
        rows: ``(tokens, num_kv_heads, size)``.
        dtype: float8_e4m3fn or float8_e5m2.
        scale: float32, one element or ``(num_kv_heads,)``; None is 1. A tensor, since devices divide by host numbers
            inexactly.
    """
    limit = torch.finfo(dtype).max
    rows = rows.float()
    if scale is not None:
        rows = rows / scale.view(-1, 1)
    return rows.clamp(-limit, limit).to(dtype)


def quantize_queries(queries: Tensor, scale: Tensor) -> Tensor:
    """
    Return queries in float8_e4m3fn as `quantize` does, for kernels that read queries and keys of one dtype; one launch
    on a GPU that Triton knows.

    Args:
        queries: ``(tokens, num_q_heads, head_size)``, of any strides.
        scale: float32, one element, or one per KV head: that of the query heads which read it.
    """
    launch = _in_one_launch() if queries.is_cuda else None
    if launch is not None:
        out = torch.empty(queries.shape, dtype=torch.float8_e4m3fn, device=queries.device)
        if launch(queries, scale, out):
            return out
    count, heads, size = queries.shape
    grouped = queries.reshape(count, scale.numel(), heads // scale.numel() * size)
    return quantize(grouped, torch.float8_e4m3fn, scale).view(queries.shape)


@cache
def _in_one_launch() -> Callable[..., bool] | None:
    if not triton_works():
        return None
    from attnplug.ops.triton_quantize import (  # noqa: PLC0415 - Triton is imported where it works, and there alone
        quantize as launch,
    )

    return launch


def dequantize(narrow: Tensor, out: Tensor) -> Tensor:
    """
    Write 8-bit floats into `out`, without a scale, and return it. Every wider float holds them exactly.

    Args:
        narrow: Contiguous, in float8_e4m3fn or float8_e5m2.
        out: Contiguous, of the same shape, in float32, bfloat16 or float16.
    """
    places = (narrow.numel(), narrow.storage_offset(), out.storage_offset())
    if narrow.device.type != "cpu" or any(place % 2 for place in places):
        return out.copy_(narrow)
    # Looking two up at once takes a tenth of the time that torch's conversion takes on the CPU.
    table = _pairs(narrow.dtype, out.dtype)
    codes = narrow.view(-1).view(torch.int16).int().bitwise_and_(0xFFFF)
    torch.index_select(table, 0, codes, out=out.view(-1).view(table.dtype))
    return out


@cache
def _pairs(narrow: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return what each two bytes stand for, as ``(65536,)`` integers that hold two numbers."""
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return codes.view(torch.uint8).view(narrow).to(dtype).view(_WIDE[dtype.itemsize])
