"""How guards describe tensors and dtypes in their messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Iterable[object]) -> str:
    """Return ``"(2, 3)"``, whatever kind of sequence holds the numbers."""
    return str(tuple(shape))


def describe(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and device: ``"(2, 3) bfloat16 on cuda:0"``."""
    return f"{shape_text(tensor.shape)} {dtype_name(tensor.dtype)} on {tensor.device}"


def layers_text(names: Sequence[str]) -> str:
    """Return ``"layer 'a'"``, or ``"32 layers from 'a' to 'z'"``."""
    first, last = names[0], names[-1]
    return f"layer {first!r}" if len(names) == 1 else f"{len(names)} layers from {first!r} to {last!r}"
