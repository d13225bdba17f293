"""Arithmetic of positions and blocks, which plans and captured plans share."""

from __future__ import annotations

import torch
from torch import Tensor


def divide(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return quotients and remainders. Integer division is most of a build, and block sizes are powers of two."""
    shift = size.bit_length() - 1
    if size == 1 << shift:
        return positions >> shift, positions & (size - 1)
    return torch.div(positions, size, rounding_mode="floor"), positions % size


def head_rows(first_heads: Tensor, num_kv_heads: int, step: int) -> Tensor:
    """
    Return ``(members * heads * keys,)``, the rows of all heads.

    Args:
        first_heads: ``(members, keys)`` rows of head 0.
        num_kv_heads: Heads.
        step: Rows from one head to the next.
    """
    heads = torch.arange(num_kv_heads, device=first_heads.device) * step
    return (first_heads.unsqueeze(1) + heads.view(-1, 1)).view(-1)
