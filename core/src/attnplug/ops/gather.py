"""Gathers keys or values from the pages of a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor


def slots_view(pages: Tensor) -> Tensor | None:
    """
    Return ``(num_blocks * block_size, num_kv_heads, head_size)`` without a copy, or None where strides do not allow it.

    They do not where something is between two pages in memory: HND pages, layers side by side, padded pages.
    """
    blocks, block_size, heads, size = pages.shape
    of_block, of_slot, *strides = pages.stride()
    if block_size > 1 and blocks > 1 and of_block != block_size * of_slot:
        return None
    return pages.as_strided((blocks * block_size, heads, size), (of_slot if block_size > 1 else of_block, *strides))


def gather_slots(pages: Tensor, slots: Tensor, *, out: Tensor | None = None) -> Tensor:
    """
    Return the contents of slots, in the order of `slots`.

    Args:
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides.
        slots: ``(n,)`` int64 slots of the KV cache.
        out: ``(n, num_kv_heads, head_size)``, written and returned. On the CPU, a buffer that is used again saves most
            of the time of the gather.
    """
    flat = slots_view(pages)
    if flat is not None:
        return torch.index_select(flat, 0, slots) if out is None else torch.index_select(flat, 0, slots, out=out)
    block_size = pages.shape[1]
    index = [torch.div(slots, block_size, rounding_mode="floor"), slots % block_size]
    if out is None:
        return pages[index[0], index[1]]
    torch.ops.aten.index.Tensor_out(pages, index, out=out)
    return out


def gather_blocks(pages: Tensor, blocks: Tensor, out: Tensor) -> Tensor:
    """
    Return whole blocks, from one number per block instead of one per slot.

    Args:
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides.
        blocks: ``(n, columns)`` int32 blocks of the KV cache.
        out: As many elements as are gathered, contiguous; written.

    Returns:
        ``(n, columns, block_size, num_kv_heads, head_size)``, a view of `out`. From HND pages the slots of all columns
        of a head are consecutive in memory, from others whole slots are: each layout is copied in its longest runs.
    """
    (count, columns), (num_blocks, block_size, heads, size) = blocks.shape, pages.shape
    of_block, of_slot, of_head, of_element = pages.stride()
    if (of_slot, of_head, of_element) == (heads * size, size, 1):
        flat = pages.as_strided((num_blocks, block_size * heads * size), (of_block, 1))
        torch.index_select(flat, 0, blocks.reshape(-1), out=out.view(count * columns, -1))
        return out.view(count, columns, block_size, heads, size)
    run = block_size * size
    if (of_slot, of_element) == (size, 1) and of_block % run == of_head % run == 0:
        strides = (of_block // run, of_head // run)
        flat = pages.as_strided(((num_blocks - 1) * strides[0] + (heads - 1) * strides[1] + 1, run), (run, 1))
        firsts = torch.arange(heads, dtype=blocks.dtype, device=blocks.device).mul_(strides[1]).view(-1, 1)
        rows = (blocks * strides[0]).unsqueeze(1) + firsts
        torch.index_select(flat, 0, rows.view(-1), out=out.view(-1, run))
        return out.view(count, heads, columns, block_size, size).permute(0, 2, 3, 1, 4)
    gathered = out.view(count, columns, block_size, heads, size)
    return gathered.copy_(pages.index_select(0, blocks.reshape(-1)).view(gathered.shape))


def gather_dense(pages: Tensor, block_table: Tensor, seq_lens: Tensor, max_seq_len: int) -> Tensor:
    """
    Return each request's keys or values, padded with zeros to the longest. Unused slots, which may hold NaN, are not
    copied.

    Args:
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides.
        block_table: ``(num_reqs, max_blocks)`` integers.
        seq_lens: ``(num_reqs,)`` integers, on the device of the pages.
        max_seq_len: Rows per request, at most ``max_blocks * block_size``.

    Returns:
        ``(num_reqs, max_seq_len, num_kv_heads, head_size)``.
    """
    block_size = pages.shape[1]
    positions = torch.arange(max_seq_len, device=pages.device).expand(block_table.shape[0], -1)
    unused = positions >= seq_lens.unsqueeze(1)
    blocks = block_table.long().gather(1, positions // block_size)
    slots = (blocks * block_size + positions % block_size).masked_fill(unused, 0)
    rows = gather_slots(pages, slots.reshape(-1)).view(*slots.shape, *pages.shape[2:])
    return rows.masked_fill_(unused[..., None, None], 0)


def gather_packed(pages: Tensor, block_table: Tensor, key_start_loc: Tensor, num_keys: int) -> Tensor:
    """
    Return the requests' keys or values one after another, without padding.

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
    return gather_slots(pages, blocks * block_size + positions % block_size)
