"""Where the keys and values of groups come from: the K/V of the call, or the pages of a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.ops.gather import as_slots, gather_blocks, pages_as_tokens
from attnplug.ops.quantize import dequantize
from attnplug.ops.write import key_and_value_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.contract.inputs.kv_cache import Cache
    from attnplug.torch_backend.builder import PlanParams
    from attnplug.torch_backend.codec import Codec
    from attnplug.torch_backend.plan import Group, Segment


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
        if isinstance(group.source, CallKeys):
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
        if codec.key_factor is not None:
            parts[0].mul_(codec.key_factor.unsqueeze(-1))
        return parts[0], parts[1]


def _width(group: Group, pages: Tensor) -> int:
    """Return how many slots are gathered per member."""
    return group.source.blocks.shape[1] * pages.shape[1] if isinstance(group.source, BlockKeys) else group.keys


def _in_place(pages: Tensor, group: Group) -> Tensor | None:
    """Keys of a single member that lie one after another in the cache, as a view; None where they do not."""
    source = group.source
    if not isinstance(source, BlockKeys) or source.run is None:
        return None
    slots = as_slots(pages)
    if slots is None:
        return None
    (of_slot, of_head, of_element), (_, heads, size) = slots.stride(), slots.shape
    first = source.run * pages.shape[1] + source.offset
    return slots.as_strided(
        (1, heads, group.keys, size), (0, of_head, of_slot, of_element), slots.storage_offset() + first * of_slot
    )


def _from_rows(rows: Tensor, given: CallKeys, group: Group, members: slice) -> Tensor:
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
    if isinstance(group.source, BlockKeys):
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


def _from_blocks(pages: Tensor, source: BlockKeys, keys: int, members: slice, out: Tensor) -> Tensor:
    """Whole blocks. Behind a request's last key they hold what is not its own: cut off, or set to 0 where it is not."""
    gathered = gather_blocks(pages, part(source.blocks, members), out)
    partial = source.partial
    if partial is not None:
        where = (partial.members, partial.columns)
        gathered[where] = gathered[where].masked_fill(partial.beyond, 0)
    tokens = gathered.permute(0, 3, 1, 2, 4)
    heads = tokens.shape[1]
    # A view: slots of a head follow each other, whichever of the two orders they were gathered in.
    rows = tokens.reshape(tokens.shape[0], heads, -1, pages.shape[3])
    return part(rows, slice(source.offset, source.offset + keys), axis=2)


def blocks_of(
    shape: PlanParams,
    table: Tensor,
    group: Sequence[Segment],
    sizes: tuple[int, int],
    index: Callable[[list[int]], Tensor],
) -> BlockKeys | None:
    """
    Return the blocks of a group; None where a number per key serves better.

    That is so where first keys lie at different places in their blocks, where whole blocks bring many keys that nobody
    sees, where they would not fit into the workspace, and for FlexAttention and written-out arithmetic: keys with gaps
    between them would be copied there.

    Args:
        shape: What planning knows of the layers.
        table: ``(members, max_blocks)`` int32, on the device.
        group: The members.
        sizes: Keys of the longest member, and how many members are gathered at once.
        index: Puts integers onto the device.
    """
    size, (keys, per_gather) = shape.block_size or 1, sizes
    first, offset = divmod(group[0].first_key, size)
    columns = -(-(offset + keys) // size)
    if (
        shape.kernel.make_mask is not None
        or not shape.kernel.fused
        or columns * size > keys + keys // 4 + 16
        or per_gather * columns * size > shape.budget.keys
    ):
        return None
    if len(group) == 1:
        blocks = table[:, first : first + columns]
        return BlockKeys(blocks, offset, None, _run(blocks))
    if any(segment.first_key % size != offset for segment in group):
        return None
    even = all(segment.keys == keys for segment in group)
    if even and all(segment.first_key == group[0].first_key for segment in group):
        return BlockKeys(table[:, first : first + columns], offset, None)
    ends = [offset + segment.keys for segment in group]
    return BlockKeys(
        _columns(
            table,
            [(segment.first_key // size, -(-end // size)) for segment, end in zip(group, ends, strict=True)],
            columns,
            index,
        ),
        offset,
        None if even else _partial_blocks(ends, columns, size, index),
    )


def _run(blocks: Tensor) -> int | None:
    """Return the first block of a single member if each is the one behind the one before it. A device is not asked."""
    if len(blocks) > 1 or not blocks.is_cpu:
        return None
    numbers: list[int] = blocks[0].tolist()
    return numbers[0] if numbers == list(range(numbers[0], numbers[0] + len(numbers))) else None


def _columns(
    table: Tensor, reaches: Sequence[tuple[int, int]], columns: int, index: Callable[[list[int]], Tensor]
) -> Tensor:
    """``(members, columns)`` blocks from each member's first on. Columns that it lacks repeat its first block."""
    first, count = index([value for part in zip(*reaches, strict=True) for value in part]).view(2, -1, 1)
    column = torch.arange(columns, device=table.device)
    return table.gather(1, torch.where(column < count, first + column, first))


def _partial_blocks(
    ends: Sequence[int], columns: int, size: int, index: Callable[[list[int]], Tensor]
) -> PartialBlocks | None:
    """
    Return what has to be cleared of gathered blocks, given where each member ends in its own.

    That is the rest of its last block; and of the columns it lacks, where its first block, which they repeat, is its
    last one too. A whole first block holds keys of its own, which are finite and masked.
    """
    partial = [
        (member, column, end % size)
        for member, end in enumerate(ends)
        if end % size
        for column in ((end // size,) if end > size else range(columns))
    ]
    if not partial:
        return None
    members, where, used = index([value for part in zip(*partial, strict=True) for value in part]).view(3, -1)
    slots = torch.arange(size, device=used.device)
    return PartialBlocks(members, where, (slots >= used.unsqueeze(1))[:, :, None, None])


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


@frozen(eq=False)
class CallKeys:
    """
    Keys that come with the call.

    Attributes:
        rows: Where they are among its K/V rows: a slice, or an index of ``members * keys``.
    """

    rows: slice | Tensor


@frozen(eq=False)
class SlotKeys:
    """
    Keys that are in the cache.

    Attributes:
        slots: ``(members * keys,)`` int64 slots.
        rows: ``(members * num_kv_heads * keys,)`` int64 rows of `head_size` elements, which bring the heads of a member
            one after another; None where whole tokens are taken.
        steps: Rows from one block to the next, one slot to the next, and one head to the next, as `rows` counts them.
    """

    slots: Tensor
    rows: Tensor | None
    steps: tuple[int, int, int]


@frozen(eq=False)
class PartialBlocks:
    """
    Gathered blocks that end behind their request's last key. What lies there, NaN included, is another's or nobody's.

    Attributes:
        members: ``(n,)`` int64, whose blocks they are.
        columns: ``(n,)`` int64, which of them.
        beyond: ``(n, block_size, 1, 1)`` bool, the slots that are cleared.
    """

    members: Tensor
    columns: Tensor
    beyond: Tensor


@frozen(eq=False)
class BlockKeys:
    """
    Keys that are in the cache, and fill most of the blocks that they are in: whole blocks are gathered.

    Attributes:
        blocks: ``(members, columns)`` int32.
        offset: Where in its first block each member's first key is.
        torn: What is cleared; None where all members end together, so that what is behind is cut off.
        run: The first block of a single member whose blocks follow each other in a cache on the CPU: they are read
            where they are, as copying them would take about as long as attending them. None gathers.
    """

    blocks: Tensor
    offset: int
    partial: PartialBlocks | None
    run: int | None = None


def part(tensor: Tensor, where: slice, axis: int = 0) -> Tensor:
    """Return `where` of an axis, a view; the tensor itself where that is all, as it is for most decodes."""
    count = where.stop - where.start
    return tensor if count == tensor.shape[axis] else tensor.narrow(axis, where.start, count)


def padded_keys(keys: int) -> int:
    """Return how many keys a request is padded to at most: kernels want masks whose rows start at 16 bytes."""
    return -(-keys // 8) * 8
