"""Finds the slots of all keys in use, for libraries that read no pages: they are packed one behind the other."""

from __future__ import annotations

import torch
from torch import Tensor


def cumulative(lens: Tensor) -> Tensor:
    """
    Return where the keys of each request start when they are packed, computed on the device.

    Args:
        lens: ``(requests,)`` int32.

    Returns:
        ``(requests + 1,)`` int32 from 0.
    """
    starts = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
    return starts


def slots_of_keys(table: Tensor, starts: Tensor, num_keys: int, block_size: int) -> Tensor:
    """
    Return the cache slot of each key, one request after another. The device is not waited for.

    Args:
        table: ``(requests, blocks)`` int32; entries beyond a request's keys may hold anything.
        starts: ``(requests + 1,)`` int32, as `cumulative` returns it.
        num_keys: How many keys there are, or more where the host does not know.
        block_size: Slots per block.

    Returns:
        ``(num_keys,)`` int64; slot 0 of the null block for what is more than there are.
    """
    rows = torch.arange(num_keys, dtype=torch.int32, device=table.device)
    requests = torch.searchsorted(starts[1:], rows, right=True).clamp_(max=table.shape[0] - 1)
    places = rows - starts[requests]
    columns = torch.div(places, block_size, rounding_mode="floor").clamp_(max=table.shape[1] - 1)
    slots = table[requests, columns].long() * block_size + places % block_size
    return slots.masked_fill_(rows >= starts[-1], 0)
