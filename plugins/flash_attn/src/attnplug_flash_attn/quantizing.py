"""Queries of 8-bit caches: kernels read queries and keys of one dtype."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from attnplug.ops import quantize
from attnplug.triton_launch import triton_works

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def quantized(query: Tensor, scale: Tensor) -> Tensor:
    """
    Return queries in float8_e4m3fn, divided by their scale as `attnplug.ops.quantize` does; one launch where Triton
    works.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        scale: float32, one element, or one per KV head: that of the query heads which read it.
    """
    launch = _in_one_launch() if query.is_cuda else None
    if launch is not None:
        out = torch.empty(query.shape, dtype=torch.float8_e4m3fn, device=query.device)
        if launch(query, scale, out):
            return out
    grouped = query.reshape(query.shape[0], scale.numel(), -1)
    return quantize(grouped, torch.float8_e4m3fn, scale).view(query.shape)


@cache
def _in_one_launch() -> Callable[..., bool] | None:
    if not triton_works():
        return None
    from attnplug_flash_attn.triton_quantize import (  # noqa: PLC0415 - Triton is imported where it works, and there alone
        quantize as launch,
    )

    return launch
