"""Masks as diffusers has them: by key ``(batch, keys)``, for a backend ``(batch, 1, 1, keys)``; and their digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mask_by_key(mask: Tensor, batch: int, keys: int) -> Tensor:
    """
    Return a mask of two axes with the four of a mask by key, where its shape is that of one.

    Args:
        mask: ``(batch, keys)``, or any other mask of two axes, which is returned as it is.
        batch: Sequences of the call.
        keys: Keys of each.
    """
    if mask.shape[0] != batch or mask.shape[1] != keys:
        return mask
    return mask[:, None, None, :]


def has_more_digits(mask: Tensor, query: Tensor) -> bool:
    """Return whether a mask is added, and loses digits in the dtype of the queries."""
    return mask.is_floating_point() and mask.dtype.itemsize > query.dtype.itemsize
