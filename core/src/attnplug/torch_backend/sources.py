"""Where the keys and values of groups come from: the K/V of the call, or the pages of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract.kv_cache import Cache
from attnplug.ops.gather import pages_as_tokens
from attnplug.torch_backend.plan import Given

if TYPE_CHECKING:
    from attnplug.torch_backend.plan import Group, Stored


@frozen(eq=False)
class Source:
    """
    The keys and values that one call can reach.

    Attributes:
        key: ``(rows, num_kv_heads, head_size)`` that came with the call.
        value: ``(rows, num_kv_heads, head_size_v)``.
        cache: The cache, or None.
        workspace: uint8 memory for gathered keys and values; used from its start by every group.
    """

    key: Tensor
    value: Tensor
    cache: Cache | None = None
    workspace: Tensor | None = None

    def of(self, group: Group) -> tuple[Tensor, Tensor]:
        """Return keys and values of a group, each ``(members, num_kv_heads, keys, size)``."""
        stored = group.source
        if isinstance(stored, Given):
            return _from_rows(self.key, stored, group), _from_rows(self.value, stored, group)
        keys, values = key_and_value_pages(cast("Cache", self.cache))
        buffer = cast("Tensor", self.workspace).view(keys.dtype)
        rows = group.members * group.keys * keys.shape[2]
        middle = rows * keys.shape[3]
        end = middle + rows * values.shape[3]
        return _from_pages(keys, stored, group, buffer[:middle]), _from_pages(values, stored, group, buffer[middle:end])


def key_and_value_pages(cache: Cache) -> tuple[Tensor, Tensor]:
    """Return the pages of keys and of values, each ``(num_blocks, block_size, num_kv_heads, size)``, as views."""
    if isinstance(cache, Mapping):
        return cache["k"], cache["v"]
    return cache[0], cache[1]


def _from_rows(rows: Tensor, given: Given, group: Group) -> Tensor:
    """Rows of the call itself: a view where those of the group lie together."""
    chosen = rows[given.rows] if isinstance(given.rows, slice) else rows.index_select(0, given.rows)
    return chosen.view(group.members, group.keys, *rows.shape[1:]).transpose(1, 2)


def _from_pages(pages: Tensor, stored: Stored, group: Group, out: Tensor) -> Tensor:
    """Rows of the cache, gathered into memory that is used again: fresh memory would cost more than the copy."""
    heads, size = pages.shape[2:]
    if stored.rows is not None and pages.stride() == (*(step * size for step in stored.steps), 1):
        flat = pages.as_strided((pages.numel() // size, size), (size, 1))
        torch.index_select(flat, 0, stored.rows, out=out.view(-1, size))
        return out.view(group.members, heads, group.keys, size)
    gathered = pages_as_tokens(pages, stored.slots, out=out.view(-1, heads, size))
    return gathered.view(group.members, group.keys, heads, size).transpose(1, 2)
