"""The record of calls, and checks of their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

journal: list[tuple[str, dict[str, Any]]] = []


def record(name: str, given: dict[str, Any]) -> None:
    """Record a call with copies of its tensors, which may change later."""
    kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}
    journal.append((name, kept))


def named(name: str) -> list[dict[str, Any]]:
    """Return the arguments of each call of a function."""
    return [given for called, given in journal if called == name]


def require(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    """Check shape, dtype and that rows are contiguous."""
    assert isinstance(tensor, Tensor), f"{what} is {tensor!r}"
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{what} is {tuple(tensor.shape)} {tensor.dtype}"
    assert tensor.numel() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{what}: rows are strided"


def require_pages(key_cache: Tensor, value_cache: Tensor, key_scales: Tensor, *, mixed: bool) -> None:
    """Check heads-first, contiguous pages and their scales."""
    shape = tuple(key_cache.shape)
    require(key_cache, shape, torch.int8, "key_cache")
    assert len(shape) == 4
    assert key_cache.is_contiguous()
    kind = value_cache.dtype
    assert kind in (torch.bfloat16, torch.float16) if mixed else kind == torch.int8
    require(value_cache, shape, kind, "value_cache")
    assert value_cache.is_contiguous()
    require(key_scales, shape[:3], torch.float32, "key_scale_cache")
    assert shape[2] in (16, 32, 64)
