"""What was called, and what of it the library would not take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

journal: list[tuple[str, dict[str, Any]]] = []


def note(name: str, given: dict[str, Any]) -> None:
    """Keep a call; shapes and numbers of its tensors may change later, so that copies are kept."""
    kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}
    journal.append((name, kept))


def named(name: str) -> list[dict[str, Any]]:
    """The arguments of each call of that name."""
    return [given for called, given in journal if called == name]


def demand(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    """Refuse another shape or dtype, and rows that are not dense."""
    assert isinstance(tensor, Tensor), f"{what} is {tensor!r}"
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), f"{what} is {tuple(tensor.shape)} {tensor.dtype}"
    assert tensor.numel() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{what} is not dense"


def demand_pages(key_cache: Tensor, value_cache: Tensor, key_scales: Tensor, *, mixed: bool) -> None:
    """Heads-first pages that lie one after another, and their scales."""
    shape = tuple(key_cache.shape)
    demand(key_cache, shape, torch.int8, "key_cache")
    assert len(shape) == 4
    assert key_cache.is_contiguous()
    kind = value_cache.dtype
    assert kind in (torch.bfloat16, torch.float16) if mixed else kind == torch.int8
    demand(value_cache, shape, kind, "value_cache")
    assert value_cache.is_contiguous()
    demand(key_scales, shape[:3], torch.float32, "key_scale_cache")
    assert shape[2] in (16, 32, 64)
