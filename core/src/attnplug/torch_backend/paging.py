"""Which blocks a group gathers, and what has to be cleared of them: a number per block, none per key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.torch_backend.plan import Blocks, Torn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from attnplug.torch_backend.grouping import Span
    from attnplug.torch_backend.shape import Shape


def blocks_of(
    shape: Shape, table: Tensor, group: Sequence[Span], sizes: tuple[int, int], index: Callable[[list[int]], Tensor]
) -> Blocks | None:
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
    size, (keys, at_once) = shape.block_size or 1, sizes
    first, offset = divmod(group[0].first_key, size)
    columns = -(-(offset + keys) // size)
    if (
        shape.kernel.make_mask is not None
        or not shape.kernel.fused
        or columns * size > keys + keys // 4 + 16
        or at_once * columns * size > shape.budget.keys
    ):
        return None
    if len(group) == 1:
        blocks = table[:, first : first + columns]
        return Blocks(blocks, offset, None, _run(blocks))
    if any(span.first_key % size != offset for span in group):
        return None
    even = all(span.keys == keys for span in group)
    if even and all(span.first_key == group[0].first_key for span in group):
        return Blocks(table[:, first : first + columns], offset, None)
    ends = [offset + span.keys for span in group]
    return Blocks(
        _columns(
            table,
            [(span.first_key // size, -(-end // size)) for span, end in zip(group, ends, strict=True)],
            columns,
            index,
        ),
        offset,
        None if even else _torn(ends, columns, size, index),
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


def _torn(ends: Sequence[int], columns: int, size: int, index: Callable[[list[int]], Tensor]) -> Torn | None:
    """
    Return what has to be cleared of gathered blocks, given where each member ends in its own.

    That is the rest of its last block; and of the columns it lacks, where its first block, which they repeat, is its
    last one too. A whole first block holds keys of its own, which are finite and masked.
    """
    torn = [
        (member, column, end % size)
        for member, end in enumerate(ends)
        if end % size
        for column in ((end // size,) if end > size else range(columns))
    ]
    if not torn:
        return None
    members, where, used = index([value for part in zip(*torn, strict=True) for value in part]).view(3, -1)
    slots = torch.arange(size, device=used.device)
    return Torn(members, where, (slots >= used.unsqueeze(1))[:, :, None, None])
