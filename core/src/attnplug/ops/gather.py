"""Gathers the keys or values of requests from the pages of a cache."""

from __future__ import annotations

import torch
from torch import Tensor


def as_slots(pages: Tensor) -> Tensor | None:
    """
    Return ``(num_blocks * block_size, num_kv_heads, head_size)`` without a copy, or None where strides forbid it.

    They forbid it where something lies between two pages: heads-first pages, layers side by side, padded pages.
    """
    blocks, block_size, heads, size = pages.shape
    if block_size > 1 and blocks > 1 and pages.stride(0) != block_size * pages.stride(1):
        return None
    return pages.as_strided(
        (blocks * block_size, heads, size),
        (pages.stride(1) if block_size > 1 else pages.stride(0), pages.stride(2), pages.stride(3)),
    )


def pages_as_tokens(pages: Tensor, slots: Tensor, *, out: Tensor | None = None) -> Tensor:
    """
    Return the contents of slots, in the order of `slots`.

    Args:
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides.
        slots: ``(n,)`` int64 slots of the cache.
        out: ``(n, num_kv_heads, head_size)``, written and returned. A buffer that is used again saves most of the time
            that fresh memory costs on the CPU.
    """
    flat = as_slots(pages)
    if flat is not None:
        return torch.index_select(flat, 0, slots) if out is None else torch.index_select(flat, 0, slots, out=out)
    block_size = pages.shape[1]
    gathered = pages[torch.div(slots, block_size, rounding_mode="floor"), slots % block_size]
    return gathered if out is None else out.copy_(gathered)


def gather_dense(pages: Tensor, block_table: Tensor, seq_lens: Tensor, max_seq_len: int) -> Tensor:
    """
    Return each request's keys or values, padded to the longest.

    Padded rows are zero: what lies in unused slots, NaN included, does not come along.

    Args:
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides.
        block_table: ``(num_reqs, max_blocks)`` integers.
        seq_lens: ``(num_reqs,)`` integers, on the device of the pages.
        max_seq_len: Rows per request, at most ``max_blocks * block_size``.

    Returns:
        ``(num_reqs, max_seq_len, num_kv_heads, head_size)``.
    """
    positions = torch.arange(max_seq_len, device=pages.device).expand(block_table.shape[0], -1)
    unused = positions >= seq_lens.unsqueeze(1)
    slots = _slots(pages, block_table, positions).masked_fill(unused, 0)
    rows = pages_as_tokens(pages, slots.reshape(-1)).view(*slots.shape, *pages.shape[2:])
    return rows.masked_fill_(unused[..., None, None], 0)


def gather_packed(pages: Tensor, block_table: Tensor, key_start_loc: Tensor, num_keys: int) -> Tensor:
    """
    Return the requests' keys or values one after another, unpadded.

    Args:
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides.
        block_table: ``(num_reqs, max_blocks)`` integers.
        key_start_loc: ``(num_reqs + 1,)`` exclusive cumulative sum of the lengths, on the device of the pages.
        num_keys: Its last entry.

    Returns:
        ``(num_keys, num_kv_heads, head_size)``.
    """
    rows = torch.arange(num_keys, device=pages.device)
    starts = key_start_loc.long()
    requests = torch.searchsorted(starts[1:], rows, right=True)
    positions = rows - starts[requests]
    block_size = pages.shape[1]
    blocks = block_table[requests, positions // block_size].long()
    return pages_as_tokens(pages, blocks * block_size + positions % block_size)


def _slots(pages: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """``(num_reqs, n)`` slots of positions that the block table covers."""
    block_size = pages.shape[1]
    return block_table.long().gather(1, positions // block_size) * block_size + positions % block_size
