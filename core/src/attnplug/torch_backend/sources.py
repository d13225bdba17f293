"""Where the keys and values of groups come from: the K/V of the call, or the pages of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract.kv_cache import Cache
from attnplug.ops.gather import pages_as_tokens
from attnplug.ops.quantize import dequantize
from attnplug.torch_backend.codec import Codec
from attnplug.torch_backend.plan import Given

if TYPE_CHECKING:
    from attnplug.torch_backend.plan import Group, Stored


@frozen(eq=False)
class Source:
    """
    The keys and values that one call can reach.

    Where the cache holds 8-bit floats, the rows of the call are encoded like it: what a token sees does not depend on
    whether the step that wrote it is this one.

    Attributes:
        key: ``(rows, num_kv_heads, head_size)`` that came with the call.
        value: ``(rows, num_kv_heads, head_size_v)``.
        cache: The cache, or None.
        workspace: uint8 memory for gathered keys and values; used from its start by every group.
        codec: What decodes rows; None where they are as they are.
    """

    key: Tensor
    value: Tensor
    cache: Cache | None = None
    workspace: Tensor | None = None
    codec: Codec | None = None
    _decoded: list[tuple[Tensor, Tensor]] = field(init=False, factory=list)

    def of(self, group: Group) -> tuple[Tensor, Tensor]:
        """Return keys and values of a group, each ``(members, num_kv_heads, keys, size)``."""
        if isinstance(group.source, Given):
            key, value = self._rows()
            return _from_rows(key, group.source, group), _from_rows(value, group.source, group)
        keys, values = key_and_value_pages(cast("Cache", self.cache))
        memory = cast("Tensor", self.workspace)
        rows = group.members * group.keys * keys.shape[2]
        middle, end = rows * keys.shape[3], rows * (keys.shape[3] + values.shape[3])
        if self.codec is None:
            buffer = memory[: end * keys.itemsize].view(keys.dtype)
            return _from_pages(keys, group, buffer[:middle]), _from_pages(values, group, buffer[middle:])
        return self._decode(group, memory, middle, end)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """The rows of the call, decoded once."""
        if self.codec is None:
            return self.key, self.value
        if not self._decoded:
            self._decoded.append(self.codec.decode(self.key, self.value))
        return self._decoded[0]

    def _decode(self, group: Group, memory: Tensor, middle: int, end: int) -> tuple[Tensor, Tensor]:
        """Gather bytes behind the place where they are decoded: not every device gathers 8-bit floats."""
        codec = cast("Codec", self.codec)
        size = codec.dtype.itemsize
        wide, narrow = memory[: end * size].view(codec.dtype), memory[end * size : end * (size + 1)]
        parts = []
        for pages, part in zip(
            key_and_value_pages(cast("Cache", self.cache)), (slice(middle), slice(middle, end)), strict=True
        ):
            rows = _from_pages(pages.view(torch.uint8), group, narrow[part])
            dequantize(narrow[part].view(codec.narrow), wide[part])
            parts.append(wide[part].as_strided(rows.shape, rows.stride()))
        if codec.of_keys is not None:
            parts[0].mul_(codec.of_keys.unsqueeze(-1))
        return parts[0], parts[1]


def key_and_value_pages(cache: Cache) -> tuple[Tensor, Tensor]:
    """Return the pages of keys and of values, each ``(num_blocks, block_size, num_kv_heads, size)``, as views."""
    if isinstance(cache, Mapping):
        return cache["k"], cache["v"]
    return cache[0], cache[1]


def _from_rows(rows: Tensor, given: Given, group: Group) -> Tensor:
    """Rows of the call itself: a view where those of the group lie together."""
    chosen = rows[given.rows] if isinstance(given.rows, slice) else rows.index_select(0, given.rows)
    return chosen.view(group.members, group.keys, *rows.shape[1:]).transpose(1, 2)


def _from_pages(pages: Tensor, group: Group, out: Tensor) -> Tensor:
    """Rows of the cache, gathered into memory that is used again: fresh memory would cost more than the copy."""
    stored, (heads, size) = cast("Stored", group.source), pages.shape[2:]
    if stored.rows is not None and pages.stride() == (*(step * size for step in stored.steps), 1):
        flat = pages.as_strided((pages.numel() // size, size), (size, 1))
        torch.index_select(flat, 0, stored.rows, out=out.view(-1, size))
        return out.view(group.members, heads, group.keys, size)
    gathered = pages_as_tokens(pages, stored.slots, out=out.view(-1, heads, size))
    return gathered.view(group.members, group.keys, heads, size).transpose(1, 2)
