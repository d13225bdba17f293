"""Merges two partial outputs of attention by LSE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashinfer.journal import journal, recorded
from flashinfer.misuse import require, require_unused

if TYPE_CHECKING:
    from torch import Tensor


@recorded
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """
    Merge another state into one, base 2. Rows without keys in both become NaN, as in the library.

    Args:
        v: ``(rows, heads, head_size)``, written.
        s: ``(rows, heads)`` float32, written.
        v_other: Of the shape and dtype of `v`.
        s_other: Of the shape and dtype of `s`.
        mask: Not modelled.
    """
    require_unused(mask=mask)
    journal.compile("cascade")
    require(s.dtype == torch.float32, f"s is {s.dtype}: a float32 copy of it is written, and lost")
    require(s_other.dtype == torch.float32, f"s_other is {s_other.dtype}")
    require(v.ndim == 3 and s.ndim == 2, f"v has shape {tuple(v.shape)}, and s {tuple(s.shape)}")
    require(v.shape == v_other.shape and v.dtype == v_other.dtype, "the states differ in shape or dtype")
    require(s.shape == s_other.shape == v.shape[:2], "LSE and outputs differ in shape")
    require(len({x.device for x in (v, s, v_other, s_other)}) == 1, "the states are on several devices")
    require(all(x.is_contiguous() for x in (v, s, v_other, s_other)), "a state is not contiguous")
    mine, other = s.double(), s_other.double()
    largest = torch.maximum(mine, other)
    weights = torch.exp2(mine - largest)[..., None], torch.exp2(other - largest)[..., None]
    total = weights[0] + weights[1]
    v.copy_((v.double() * weights[0] + v_other.double() * weights[1]) / total)
    s.copy_(largest + total[..., 0].log2())
