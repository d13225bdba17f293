"""What one build prepares for all layers of a plan key: which rows meet which keys, in which kernel call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.torch_backend.kernels import Kernel


@frozen(eq=False)
class Tile:
    """
    One kernel call: rows of a group against keys of the group.

    Attributes:
        rows: Rows of each member, as ``(start, end)``.
        keys: Keys of each member, likewise.
        mask: ``(members or 1, 1, rows * ratio, keys)`` additive, with distances where ALiBi was asked for (`Slanted`),
            or the kernel's own; None where every row sees every key.
        causal: Whether the tile is a square in which row i sees keys up to i; it has no mask then.
        blind: ``(members, rows)`` whether a row attends nothing, where only the device knows; such a row is computed
            over all keys, and its result is thrown away.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    mask: Any = None
    causal: bool = False
    blind: Tensor | None = None


@frozen(eq=False)
class Given:
    """
    Keys that come with the call.

    Attributes:
        rows: Where they are among its K/V rows: a slice, or an index of ``members * keys``.
    """

    rows: slice | Tensor


@frozen(eq=False)
class Stored:
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
class Torn:
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
class Blocks:
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
    torn: Torn | None
    run: int | None = None


@frozen(eq=False)
class Rows:
    """
    The query rows of a group.

    Attributes:
        taken: Where they are among the call's query rows: a slice, or an index of ``members * rows``.
        kept: Which of the ``members * rows`` results are no padding; None for all.
        put: Where those go among the output rows: a slice or an index.
    """

    taken: slice | Tensor
    kept: Tensor | None
    put: slice | Tensor


@frozen(eq=False)
class Group:
    """
    Requests that are computed together, as a rectangle.

    Attributes:
        members: Requests in the group.
        rows: Query rows of each, padded.
        keys: Keys of each, padded.
        queries: Where its query rows are.
        source: Where its keys are.
        tiles: The kernel calls.
        at_once: Members that are gathered at once, of a group whose members are equal; None for all.
    """

    members: int
    rows: int
    keys: int
    queries: Rows
    source: Given | Stored | Blocks
    tiles: tuple[Tile, ...]
    at_once: int | None = None


@frozen(eq=False)
class Plan:
    """
    A batch, planned.

    Attributes:
        kernel: What attends each tile.
        groups: The rectangles; each row that attends something is in exactly one.
        empty: Row ranges ``(start, end)`` that attend nothing.
        prefix: All rows against the keys that all requests share, which the other groups leave out; None for none.
    """

    kernel: Kernel
    groups: tuple[Group, ...]
    empty: tuple[tuple[int, int], ...]
    prefix: Group | None = None
