"""Where the keys and values of groups come from: the K/V of the call, or the pages of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.ops.gather import as_slots, gather_blocks, pages_as_tokens
from attnplug.ops.quantize import dequantize
from attnplug.ops.write import key_and_value_pages
from attnplug.torch_backend.plan import Blocks, Given
from attnplug.torch_backend.results import part

if TYPE_CHECKING:
    from attnplug.contract.inputs.kv_cache import Cache
    from attnplug.torch_backend.codec import Codec
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

    def of(self, group: Group, members: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of members of a group, each ``(members, num_kv_heads, keys, size)``."""
        if isinstance(group.source, Given):
            return tuple(_from_rows(rows, group.source, group, members) for rows in self._rows())  # type: ignore[return-value]
        keys, values = key_and_value_pages(cast("Cache", self.cache))
        if self.codec is None:
            here, there = _in_place(keys, group), _in_place(values, group)
            if here is not None and there is not None:
                return here, there
        memory = cast("Tensor", self.workspace)
        slots = (members.stop - members.start) * _width(group, keys) * keys.shape[2]
        middle, end = slots * keys.shape[3], slots * (keys.shape[3] + values.shape[3])
        if self.codec is None:
            buffer = memory[: end * keys.itemsize].view(keys.dtype)
            parts = (buffer[:middle], buffer[middle:])
            return _from_pages(keys, group, members, parts[0]), _from_pages(values, group, members, parts[1])
        return self._decode(group, members, memory, middle, end)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """The rows of the call, decoded once."""
        if self.codec is None:
            return self.key, self.value
        if not self._decoded:
            self._decoded.append(self.codec.decode(self.key, self.value))
        return self._decoded[0]

    def _decode(self, group: Group, members: slice, memory: Tensor, middle: int, end: int) -> tuple[Tensor, Tensor]:
        """Gather bytes behind the place where they are decoded: not every device gathers 8-bit floats."""
        codec = cast("Codec", self.codec)
        size = codec.dtype.itemsize
        wide, narrow = memory[: end * size].view(codec.dtype), memory[end * size : end * (size + 1)]
        parts = []
        for pages, place in zip(
            key_and_value_pages(cast("Cache", self.cache)), (slice(middle), slice(middle, end)), strict=True
        ):
            rows = _from_pages(pages.view(torch.uint8), group, members, narrow[place])
            dequantize(narrow[place].view(codec.narrow), wide[place])
            offset = rows.storage_offset() - narrow[place].storage_offset()
            parts.append(wide[place][offset:].as_strided(rows.shape, rows.stride()))
        if codec.of_keys is not None:
            parts[0].mul_(codec.of_keys.unsqueeze(-1))
        return parts[0], parts[1]


def _width(group: Group, pages: Tensor) -> int:
    """Return how many slots are gathered per member."""
    return group.source.blocks.shape[1] * pages.shape[1] if isinstance(group.source, Blocks) else group.keys


def _in_place(pages: Tensor, group: Group) -> Tensor | None:
    """Keys of a single member that lie one after another in the cache, as a view; None where they do not."""
    source = group.source
    if not isinstance(source, Blocks) or source.run is None:
        return None
    slots = as_slots(pages)
    if slots is None:
        return None
    (of_slot, of_head, of_element), (_, heads, size) = slots.stride(), slots.shape
    first = source.run * pages.shape[1] + source.offset
    return slots.as_strided(
        (1, heads, group.keys, size), (0, of_head, of_slot, of_element), slots.storage_offset() + first * of_slot
    )


def _from_rows(rows: Tensor, given: Given, group: Group, members: slice) -> Tensor:
    """Rows of the call itself: a view where those of the group lie together."""
    where = given.rows
    first, last = members.start * group.keys, members.stop * group.keys
    if isinstance(where, slice):
        chosen = rows[where.start + first : where.start + last]
    else:
        chosen = rows.index_select(0, where[first:last])
    return chosen.view(-1, group.keys, *rows.shape[1:]).transpose(1, 2)


def _from_pages(pages: Tensor, group: Group, members: slice, out: Tensor) -> Tensor:
    """Rows of the cache, gathered into memory that is used again: fresh memory would cost more than the copy."""
    if isinstance(group.source, Blocks):
        return _from_blocks(pages, group.source, group.keys, members, out)
    stored, (heads, size) = cast("Stored", group.source), pages.shape[2:]
    if stored.rows is not None and pages.stride() == (*(step * size for step in stored.steps), 1):
        flat = pages.as_strided((pages.numel() // size, size), (size, 1))
        first, last = (end * group.keys * heads for end in (members.start, members.stop))
        torch.index_select(flat, 0, stored.rows[first:last], out=out.view(-1, size))
        return out.view(-1, heads, group.keys, size)
    slots = stored.slots[members.start * group.keys : members.stop * group.keys]
    gathered = pages_as_tokens(pages, slots, out=out.view(-1, heads, size))
    return gathered.view(-1, group.keys, heads, size).transpose(1, 2)


def _from_blocks(pages: Tensor, source: Blocks, keys: int, members: slice, out: Tensor) -> Tensor:
    """Whole blocks. Behind a request's last key they hold what is not its own: cut off, or set to 0 where it is not."""
    gathered = gather_blocks(pages, part(source.blocks, members), out)
    torn = source.torn
    if torn is not None:
        where = (torn.members, torn.columns)
        gathered[where] = gathered[where].masked_fill(torn.beyond, 0)
    tokens = gathered.permute(0, 3, 1, 2, 4)
    heads = tokens.shape[1]
    # A view: slots of a head follow each other, whichever of the two orders they were gathered in.
    rows = tokens.reshape(tokens.shape[0], heads, -1, pages.shape[3])
    return part(rows, slice(source.offset, source.offset + keys), axis=2)
