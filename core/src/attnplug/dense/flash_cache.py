"""The KV cache of `flash_attn_with_kvcache`, as pages with a block table, and where its new keys go."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from attnplug.dense.flash_arguments import bound_of
from attnplug.dense.pages import NewKeys
from attnplug.errors import TensorError, shown

_LARGEST: Final = 2**30
"""Keys, blocks and rows at most: with the new keys of a call they are still int32."""


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    """
    Check the axes of the tensors of a call.

    Raises:
        TensorError: One has others, or one of new keys and values is absent.
    """
    if (k is None) != (v is None):
        raise TensorError("one of k and v was given", "new keys have new values", "pass both, or neither")
    for name, one in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if one is not None and one.ndim != 4:
            raise TensorError(
                f"{name} of shape {tuple(one.shape)} was given",
                "it has four axes, the heads and their sizes last",
                "pass (sequences, tokens, heads, head_size), or pages with a block_table",
            )
    if k is not None and v is not None and (k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]):
        raise TensorError(
            f"k of shape {tuple(k.shape)} and v of shape {tuple(v.shape)} were given for {q.shape[0]} sequences",
            "each sequence has as many new keys as new values",
            "pass such tensors",
        )


def as_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Return pages of keys and of values, and the block table: that of a cache without pages is made up.

    Raises:
        TensorError: The block table, or the rows of a cache without pages, are no table or no numbers of rows.
    """
    if block_table is not None:
        _check_whole("block_table", block_table, 2, (q.shape[0], "blocks"))
        if rows is not None:
            raise TensorError(
                "cache_batch_idx was given with a block_table",
                "a block table has a row for each sequence",
                "pass block_table[cache_batch_idx] alone",
            )
        return k_cache, v_cache, as_int32("block_table", block_table)
    capacity = k_cache.shape[1]
    if v_cache.shape[:2] != k_cache.shape[:2] or not capacity:
        raise TensorError(
            f"k_cache of shape {tuple(k_cache.shape)} and v_cache of shape {tuple(v_cache.shape)} were given",
            "they have as many sequences and as much room, of at least one token",
            "pass two halves of one cache",
        )
    size = _page_size(k_cache, v_cache)
    shape = (-1, size)
    pages = [one if size == capacity else one.view(*shape, *one.shape[2:]) for one in (k_cache, v_cache)]
    if rows is not None:
        _check_whole("cache_batch_idx", rows, 1, (q.shape[0],))
    rows = torch.arange(q.shape[0], device=q.device) if rows is None else rows
    each = capacity // size
    table = rows[:, None] * each + torch.arange(each, device=q.device)
    return pages[0], pages[1], as_int32("cache_batch_idx", table)


def _page_size(k_cache: Tensor, v_cache: Tensor) -> int:
    """Choose a page size for a contiguous cache: 256 or 16 if it divides the capacity, with at least two pages."""
    rows, capacity = k_cache.shape[:2]
    if rows > 1 and any(one.stride(0) != capacity * one.stride(1) for one in (k_cache, v_cache)):
        return capacity  # what is between the rows is in no page
    divisors = (size for size in range(capacity // 2, 0, -1) if capacity % size == 0)
    sizes = (*(size for size in (256, 16) if capacity % size == 0), capacity, *divisors)  # 256: FlashAttention 2's
    return next((size for size in sizes if rows * capacity // size > 1), capacity)


def cached_lengths(q: Tensor, cache_seqlens: object, room: int, *, has_new: bool, paged: bool) -> Tensor:
    """
    Return the keys of each sequence before the new ones.

    Raises:
        TensorError: They are no numbers of keys.
    """
    if isinstance(cache_seqlens, Tensor):
        _check_whole("cache_seqlens", cache_seqlens, 1, (q.shape[0],))
        if cache_seqlens.shape != q.shape[:1] or (cache_seqlens.is_cpu and bool((cache_seqlens < 0).any())):
            raise TensorError(
                f"cache_seqlens of shape {tuple(cache_seqlens.shape)} or with a number below 0 was given",
                f"it is ({q.shape[0]},) int32, from 0",
                "pass the keys of each sequence before the new ones",
            )
        return as_int32("cache_seqlens", cache_seqlens)
    if cache_seqlens is None:
        if has_new or paged:
            raise TensorError(
                "cache_seqlens=None was given with " + ("new keys" if has_new else "a block_table"),
                "the number of keys before the call is needed",
                "pass cache_seqlens",
            )
        cache_seqlens = room
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int) or not 0 <= cache_seqlens <= _LARGEST:
        raise TensorError(
            f"cache_seqlens={shown(cache_seqlens)} was given", "it is a number of keys, or a tensor", "pass such"
        )
    return torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)


def new_keys(k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, pages: tuple[int, ...]) -> tuple[NewKeys, Tensor]:
    """
    Return what is written where, and the lengths with the new keys.

    Args:
        k: ``(sequences, new keys, num_kv_heads, head_size)``.
        v: As `k`.
        lengths: ``(sequences,)``, keys before the new ones.
        table: ``(sequences, blocks)``.
        pages: How many blocks the cache has, and the tokens of a block.

    Raises:
        TensorError: There is no room, and the lengths are on the CPU. On a device, keys without room are not written.
    """
    count, size = k.shape[1], pages[1]
    after, room = lengths + count, table.shape[1] * size
    longest(after, room, None)
    slots = slots_of(lengths, count, table, pages)
    new = NewKeys(key=k.flatten(0, 1), value=v.flatten(0, 1), slots=slots.flatten(), count=count)
    return new, after if after.is_cpu else after.clamp(max=room)


def slots_of(lengths: Tensor, count: int, table: Tensor, pages: tuple[int, ...]) -> Tensor:
    """Return the slots of new keys, ``(sequences, count)``; -1 where the table or the cache has no block for one."""
    (blocks, size), width = pages, table.shape[1]
    positions = lengths[:, None].long() + torch.arange(count, device=table.device)
    columns = positions.div(size, rounding_mode="floor")
    block = table.long().gather(1, columns.clamp(0, width - 1)) if width else torch.full_like(columns, -1)
    exists = (columns >= 0) & (columns < width) & (block >= 0) & (block < blocks)
    return torch.where(exists, block * size + positions % size, -1)


def longest(lengths: Tensor, room: int, bound: int | None) -> int:
    """
    Return the longest sequence, or an upper bound on a device, which is not waited for.

    Raises:
        TensorError: It is longer than the room, and the lengths are on the CPU.
    """
    most = room if bound is None else min(room, bound_of("max_seqlen_k", bound))
    if not lengths.is_cpu:
        return most
    found = int(lengths.max()) if lengths.numel() else 0
    if found > most:
        raise TensorError(
            f"a sequence of {found} keys was given",
            f"the cache and max_seqlen_k have room for {most}, the new ones included",
            "pass a larger cache, a wider block_table or a larger max_seqlen_k",
        )
    return found


def as_int32(name: str, one: Tensor) -> Tensor:
    """
    Return whole numbers as int32. What does not fit is refused on the CPU; on a device, which is not waited for, it
    becomes a number that is beyond every cache: keys are not written there.

    Raises:
        TensorError: A number on the CPU does not fit.
    """
    if one.dtype == torch.int32:
        return one
    if not one.is_cpu:
        return one.clamp(-_LARGEST, _LARGEST).to(torch.int32)
    if one.numel() and not -_LARGEST <= int(one.min()) <= int(one.max()) <= _LARGEST:
        raise TensorError(
            f"{name} with numbers from {int(one.min()):,} to {int(one.max()):,} was given",
            f"they are at most {_LARGEST:,}",
            f"correct them; a tensor that holds int32 bits is read with {name}.view(torch.int32)",
        )
    return one.to(torch.int32)


def _check_whole(name: str, one: object, axes: int, shape: tuple[object, ...]) -> None:
    """Check that an argument is a tensor of whole numbers with so many axes."""
    if isinstance(one, Tensor) and one.ndim == axes and one.dtype in (torch.int32, torch.int64):
        return
    found = f"of shape {tuple(one.shape)} and {one.dtype}" if isinstance(one, Tensor) else f"of {type(one).__name__}"
    expected = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    raise TensorError(f"{name} {found} was given", f"it is ({expected}) int32", "pass such a tensor")
