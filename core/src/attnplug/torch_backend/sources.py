"""Where the keys and values of groups come from: the K/V of the call, or the pages of a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract.inputs.upload import upload
from attnplug.ops.gather import gather_blocks, gather_slots, slots_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract.inputs.kv_cache import KVCache
    from attnplug.torch_backend.builder import PlanParams
    from attnplug.torch_backend.codec import Codec
    from attnplug.torch_backend.plan import Group, Segment


@frozen(eq=False)
class CallKeys:
    """
    Keys that come with the call.

    Attributes:
        rows: Their K/V rows: a slice, or an index of ``members * keys``.
    """

    rows: slice | Tensor

    def take(self, rows: Tensor, keys: int, members: slice) -> Tensor:
        """Return ``(members, num_kv_heads, keys, size)`` of K or V rows: a view where `rows` is a slice."""
        first, last = members.start * keys, members.stop * keys
        if isinstance(self.rows, slice):
            chosen = rows[self.rows.start + first : self.rows.start + last]
        else:
            chosen = rows.index_select(0, self.rows[first:last])
        return chosen.view(-1, keys, *rows.shape[1:]).transpose(1, 2)


@frozen(eq=False)
class SlotKeys:
    """
    Keys in the KV cache, a slot number per key.

    Attributes:
        slots: ``(members * keys,)`` int64 slots.
        rows: ``(members * num_kv_heads * keys,)`` int64 rows of `head_size` elements, one head of a member after
            another, for kernels that read keys head by head; None where whole slots are gathered.
        strides: Rows from one block, one slot, and one head to the next, as `rows` counts them.
    """

    slots: Tensor
    rows: Tensor | None
    strides: tuple[int, int, int]

    def width(self, keys: int, block_size: int) -> int:
        """Return how many slots are gathered per member."""
        del block_size
        return keys

    def gather(self, pages: Tensor, keys: int, members: slice, out: Tensor) -> Tensor:
        """Return ``(members, num_kv_heads, keys, size)`` of the pages of K or V, gathered into `out`."""
        heads, size = pages.shape[2:]
        if self.rows is not None and pages.stride() == (*(stride * size for stride in self.strides), 1):
            flat = pages.as_strided((pages.numel() // size, size), (size, 1))
            first, last = members.start * keys * heads, members.stop * keys * heads
            torch.index_select(flat, 0, self.rows[first:last], out=out.view(-1, size))
            return out.view(-1, heads, keys, size)
        slots = self.slots[members.start * keys : members.stop * keys]
        gathered = gather_slots(pages, slots, out=out.view(-1, heads, size))
        return gathered.view(-1, keys, heads, size).transpose(1, 2)


@frozen(eq=False)
class PartialBlocks:
    """
    Gathered blocks that extend beyond their request's last key. Slots there are cleared: they may hold NaN.

    Attributes:
        members: ``(n,)`` int64 members that the blocks belong to.
        columns: ``(n,)`` int64 columns of the blocks.
        beyond: ``(n, block_size, 1, 1)`` bool, the slots that are cleared.
    """

    members: Tensor
    columns: Tensor
    beyond: Tensor


@frozen(eq=False)
class BlockKeys:
    """
    Keys in the KV cache that fill most of their blocks: whole blocks are gathered.

    Attributes:
        blocks: ``(members, columns)`` int32.
        offset: The slot of each member's first key in its first block.
        partial: The blocks with slots to clear; None where all members end together, so that the rest is cut off.
        run: The first block of a single member whose blocks are consecutive in a KV cache on the CPU. Its keys are read
            in place, since a copy would take about as long as the attention. None gathers.
        ends: In place of `partial` on the CPU, where clearing a member's end is faster than copies of whole blocks: the
            members that are shorter than the group, with their keys.
    """

    blocks: Tensor
    offset: int
    partial: PartialBlocks | None
    run: int | None = None
    ends: tuple[tuple[int, int], ...] = ()

    def width(self, keys: int, block_size: int) -> int:
        """Return how many slots are gathered per member."""
        del keys
        return self.blocks.shape[1] * block_size

    def view(self, pages: Tensor, keys: int) -> Tensor | None:
        """Return ``(1, num_kv_heads, keys, size)`` in place; None where the keys are not consecutive in memory."""
        slots = None if self.run is None else slots_view(pages)
        if slots is None or self.run is None:
            return None
        (of_slot, of_head, of_element), (_, heads, size) = slots.stride(), slots.shape
        first = slots.storage_offset() + (self.run * pages.shape[1] + self.offset) * of_slot
        return slots.as_strided((1, heads, keys, size), (0, of_head, of_slot, of_element), first)

    def gather(self, pages: Tensor, keys: int, members: slice, out: Tensor) -> Tensor:
        """Return ``(members, num_kv_heads, keys, size)`` of the pages of K or V, gathered into `out`."""
        gathered = gather_blocks(pages, narrow(self.blocks, members), out)
        if self.partial is not None:
            where = (self.partial.members, self.partial.columns)
            gathered[where] = gathered[where].masked_fill(self.partial.beyond, 0)
        tokens = gathered.permute(0, 3, 1, 2, 4)
        # A view: gather_blocks leaves the slots of a head at one stride, in either of its two orders.
        rows = tokens.reshape(*tokens.shape[:2], -1, pages.shape[3])
        rows = narrow(rows, slice(self.offset, self.offset + keys), axis=2)
        (of_member, of_head, of_slot, _), start = rows.stride(), rows.storage_offset()
        for member, end in self.ends:  # one view each, since these are the short calls
            shape, first = (rows.shape[1], keys - end, rows.shape[3]), start + member * of_member + end * of_slot
            rows.as_strided(shape, (of_head, of_slot, 1), first).zero_()
        return rows


Keys: TypeAlias = CallKeys | SlotKeys | BlockKeys
"""The keys of a group, which are in the call or in the KV cache."""


@frozen(eq=False)
class Sources:
    """
    The keys and values that one call can read.

    With an FP8 KV cache, the rows of the call are rounded too: the keys and values of a token do not depend on the step
    that wrote them.

    Attributes:
        key: ``(rows, num_kv_heads, head_size)`` of the call.
        value: ``(rows, num_kv_heads, head_size_v)`` of the call.
        cache: The KV cache, or None.
        workspace: uint8 memory for gathered keys and values; each group uses it from its start.
        codec: The codec of an FP8 KV cache; None for others.
        size_of_latents: The first elements of a key, which are its value too; None where values are apart.
    """

    key: Tensor
    value: Tensor
    cache: KVCache | None = None
    workspace: Tensor | None = None
    codec: Codec | None = None
    size_of_latents: int | None = None
    _decoded: list[tuple[Tensor, Tensor]] = field(init=False, factory=list)

    def of(self, group: Group, members: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of members of a group, each ``(members, num_kv_heads, keys, size)``."""
        keys, source = group.keys, group.source
        if isinstance(source, CallKeys):
            key, value = self._call_rows()
            return source.take(key, keys, members), source.take(value, keys, members)
        cache = cast("KVCache", self.cache)
        if self.size_of_latents is not None:
            key = self._latents(cache.k, group, members)
            return key, key[..., : self.size_of_latents]
        pages = (cache.k, cache.v)
        if self.codec is None and isinstance(source, BlockKeys):
            key_view, value_view = source.view(pages[0], keys), source.view(pages[1], keys)
            if key_view is not None and value_view is not None:
                return key_view, value_view
        _, block_size, heads, _ = pages[0].shape
        slots = (members.stop - members.start) * source.width(keys, block_size) * heads
        sizes = [slots * one.shape[3] for one in pages]
        if self.codec is not None:
            key, value = self._decode(self.codec, group, members, pages, sizes)
            return key, value
        memory = cast("Tensor", self.workspace)[: sum(sizes) * pages[0].itemsize].view(pages[0].dtype)
        packed = _packed(*pages) if pages[0].is_cpu else None
        if packed is not None:
            both = source.gather(packed, keys, members, memory)
            width = pages[0].shape[3]
            return both[..., :width], both[..., width:]
        return (
            source.gather(pages[0], keys, members, memory[: sizes[0]]),
            source.gather(pages[1], keys, members, memory[sizes[0] :]),
        )

    def _latents(self, pages: Tensor, group: Group, members: slice) -> Tensor:
        """Return the keys of members of a group, ``(members, 1, keys, size)``."""
        keys, source = group.keys, cast("SlotKeys | BlockKeys", group.source)
        view = source.view(pages, keys) if self.codec is None and isinstance(source, BlockKeys) else None
        if view is not None:
            return view
        count = (members.stop - members.start) * source.width(keys, pages.shape[1]) * pages.shape[3]
        if self.codec is not None:
            return self._decode(self.codec, group, members, (pages,), [count])[0]
        memory = cast("Tensor", self.workspace)[: count * pages.itemsize].view(pages.dtype)
        return source.gather(pages, keys, members, memory)

    def _call_rows(self) -> tuple[Tensor, Tensor]:
        """Return the rows of the call, decoded once."""
        if self.codec is None:
            return self.key, self.value
        if not self._decoded:
            self._decoded.append(self.codec.decode(self.key, self.value))
        return self._decoded[0]

    def _decode(
        self, codec: Codec, group: Group, members: slice, pages: tuple[Tensor, ...], sizes: list[int]
    ) -> list[Tensor]:
        """Gather bytes, since not every device can gather FP8, and decode them into the memory before them."""
        memory, source = cast("Tensor", self.workspace), cast("SlotKeys | BlockKeys", group.source)
        widths = [(one.shape[3], codec.width(one.shape[3])) for one in pages]
        wide_sizes = [size // narrow * wide for size, (narrow, wide) in zip(sizes, widths, strict=True)]
        start = sum(wide_sizes) * codec.dtype.itemsize
        decoded = torch.split(memory[:start].view(codec.dtype), wide_sizes)
        encoded = torch.split(memory[start : start + sum(sizes)], sizes)
        found = []
        for one, part, wide, (size, width) in zip(pages, encoded, decoded, widths, strict=True):
            rows = source.gather(one.view(torch.uint8), group.keys, members, part)
            codec.widen(part, wide)
            # Rows are wider than their records: all but the last stride are of whole rows.
            steps = [step // size * width for step in (rows.storage_offset() - part.storage_offset(), *rows.stride())]
            found.append(wide[steps[0] :].as_strided((*rows.shape[:3], width), (*steps[1:4], 1)))
        if codec.key_factor is not None:
            found[0].mul_(codec.key_factor.unsqueeze(-1))
        return found


def _packed(keys: Tensor, values: Tensor) -> Tensor | None:
    """Return pages ``(..., head_size + head_size_v)`` where each key has its value behind it in memory, else None."""
    *shape, size = keys.shape
    strides, together = keys.stride(), size + values.shape[3]
    if strides != values.stride() or strides[3] != 1 or min(strides[:3]) < together:
        return None
    if values.storage_offset() != keys.storage_offset() + size:
        return None
    # The same memory: tensors apart may have such offsets, too.
    if values.untyped_storage().data_ptr() != keys.untyped_storage().data_ptr():
        return None
    return keys.as_strided((*shape, together), strides)


def blocks_of(
    params: PlanParams, table: Tensor, segments: Sequence[Segment], keys: int, per_gather: int
) -> BlockKeys | None:
    """
    Return the blocks of a group; None where a slot number per key is better.

    Slot numbers are better if first keys are at different offsets in their blocks, if blocks hold many keys that are
    not read, if blocks do not fit into the workspace, and for FlexAttention and the unfused kernel, which would copy
    keys with gaps between them.

    Args:
        params: The layers' parameters.
        table: ``(members, max_blocks)`` int32, on the device.
        segments: The members.
        keys: Keys of the longest member.
        per_gather: Members that are gathered at once.
    """
    size = params.block_size or 1
    first, offset = divmod(segments[0].first_key, size)
    columns = -(-(offset + keys) // size)
    if (
        params.kernel.make_mask is not None
        or not params.kernel.fused
        or columns * size > keys + keys // 4 + 16
        or per_gather * columns * size > params.budget.keys
    ):
        return None
    if len(segments) == 1:
        blocks = table[:, first : first + columns]
        return BlockKeys(blocks, offset, None, _run(blocks))
    if any(segment.first_key % size != offset for segment in segments):
        return None
    uniform = all(segment.keys == keys for segment in segments)
    if uniform and all(segment.first_key == segments[0].first_key for segment in segments):
        return BlockKeys(table[:, first : first + columns], offset, None)
    ends = [offset + segment.keys for segment in segments]
    blocks = _columns(table, [segment.first_key // size for segment in segments], [-(-end // size) for end in ends])
    if table.is_cpu:
        shorter = ((member, one.keys) for member, one in enumerate(segments) if one.keys < keys)
        return BlockKeys(blocks, offset, None, ends=tuple(shorter))
    return BlockKeys(blocks, offset, None if uniform else _partial_blocks(ends, columns, size, table.device))


def _run(blocks: Tensor) -> int | None:
    """Return the first block of a single member whose blocks are consecutive. A device is not waited for."""
    if len(blocks) > 1 or not blocks.is_cpu:
        return None
    numbers: list[int] = blocks[0].tolist()
    return numbers[0] if numbers == list(range(numbers[0], numbers[0] + len(numbers))) else None


def _columns(table: Tensor, firsts: list[int], counts: list[int]) -> Tensor:
    """Return ``(members, columns)`` blocks from each member's first on. Columns beyond its own repeat its first."""
    first, count = index_on(table.device, [*firsts, *counts]).view(2, -1, 1)
    column = torch.arange(max(counts), device=table.device)
    return table.gather(1, torch.where(column < count, first + column, first))


def _partial_blocks(ends: Sequence[int], columns: int, size: int, device: torch.device) -> PartialBlocks | None:
    """Return the gathered blocks with slots to clear; `ends` are the slots after each member's last key."""
    # Those are a member's last block and, where it has a single block, the columns that repeat it. A full first block
    # that is repeated needs nothing: it holds the member's keys, which are finite and masked.
    partial = [
        (member, column, end % size)
        for member, end in enumerate(ends)
        if end % size
        for column in ((end // size,) if end > size else range(columns))
    ]
    if not partial:
        return None
    members, where, used = index_on(device, [one for column in zip(*partial, strict=True) for one in column]).view(
        3, -1
    )
    slots = torch.arange(size, device=device)
    return PartialBlocks(members, where, (slots >= used.unsqueeze(1))[:, :, None, None])


def slots_at(params: PlanParams, table: Tensor, positions: Tensor) -> SlotKeys:
    """
    Return a slot number per key.

    Args:
        params: The layers' parameters.
        table: ``(members, max_blocks)`` integers, on the device.
        positions: ``(members, keys)`` int64 positions of the keys in their requests.
    """
    size, strides, rows = cast("int", params.block_size), params.row_strides, None
    columns, offsets = divide(positions, size)
    blocks = table.long().gather(1, columns)
    if strides is not None:
        rows = head_rows(blocks * strides[0] + offsets * strides[1], params.num_kv_heads, strides[2])
    return SlotKeys((blocks * size + offsets).view(-1), rows, strides or (0, 0, 0))


def divide(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return quotients and remainders: by shifts for powers of two, since integer division is most of a build."""
    shift = size.bit_length() - 1
    if size == 1 << shift:
        return positions >> shift, positions & (size - 1)
    return torch.div(positions, size, rounding_mode="floor"), positions % size


def head_rows(first_heads: Tensor, num_kv_heads: int, stride: int) -> Tensor:
    """
    Return ``(members * heads * keys,)``, the rows of all heads.

    Args:
        first_heads: ``(members, keys)`` rows of head 0.
        num_kv_heads: Heads.
        stride: Rows from one head to the next.
    """
    heads = torch.arange(num_kv_heads, device=first_heads.device) * stride
    return (first_heads.unsqueeze(1) + heads.view(-1, 1)).view(-1)


def padded_keys(keys: int) -> int:
    """Return the most keys that a request is padded to: kernels require masks with rows aligned to 16 bytes."""
    return -(-keys // 8) * 8


def index_on(device: torch.device, values: list[int]) -> Tensor:
    """Return numbers as an int64 tensor on the device, without waiting for it."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def narrow(tensor: Tensor, where: slice, axis: int = 0) -> Tensor:
    """Return a part of an axis as a view; the tensor itself if the part is the whole axis, as for most decodes."""
    count = where.stop - where.start
    return tensor if count == tensor.shape[axis] else tensor.narrow(axis, where.start, count)
