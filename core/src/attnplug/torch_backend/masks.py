"""Which query sees which key: masks, ALiBi distances, and the tiles that groups are cut into."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.torch_backend.builder import PlanParams
    from attnplug.torch_backend.plan import Segment


@frozen
class Visibility:
    """
    What positions see of each other.

    Attributes:
        left: Positions seen to the left, -1 for all.
        right: Positions seen to the right, -1 for all; 0 is causal.
    """

    left: int
    right: int

    def of(self, distance: Tensor) -> Tensor:
        """Return whether a key is seen, given its position minus the query's."""
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            seen &= distance >= -self.left
        if self.right >= 0:
            seen &= distance <= self.right
        return seen

    def binds(self, rows: int, keys: int) -> bool:
        """Whether any of the last `rows` positions out of `keys` misses a key."""
        return 0 <= self.right < rows - 1 or 0 <= self.left < keys - 1


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


class MaskTemplate:
    """
    One mask from which every tile of equally long requests takes a slice.

    What a row sees depends on distances only, so that tiles at other positions see the same picture, shifted.

    Args:
        sight: Who sees whom.
        rows: Query positions of a tile.
        distances: The smallest distance between a key and a tile's first query, and the largest one plus 1.
        repeat: How often each row is repeated, for query heads that share a key head.
        dtype: Dtype of the mask.
        device: Where it lives.
    """

    def __init__(
        self,
        visibility: Visibility,
        rows: int,
        distances: tuple[int, int],
        *,
        repeat: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._low = distances[0]
        self._repeat = repeat
        distance = torch.arange(*distances, device=device) - torch.arange(rows, device=device).unsqueeze(1)
        self._mask = additive(visibility.of(distance).repeat_interleave(repeat, 0), dtype)

    def tile(self, rows: int, start: int, end: int) -> Tensor:
        """Return ``(1, 1, rows * repeat, end - start)``, for keys at such distances from the first row."""
        return self._mask[None, None, : rows * self._repeat, start - self._low : end - self._low]


def ragged_mask(
    visibility: Visibility, num_rows: Tensor, num_keys: Tensor, rows: int, keys: int, *, repeat: int, dtype: torch.dtype
) -> Tensor:
    """
    Return the mask of a group whose members differ in length.

    Rows beyond a member's own repeat what its last row sees, so that no row of the group sees nothing.

    Args:
        sight: Who sees whom.
        num_rows: ``(members,)`` rows per member.
        num_keys: ``(members,)`` keys per member; its last row stands at its last key.
        rows: The most rows.
        keys: The most keys.
        repeat: How often each row is repeated.
        dtype: Dtype of the mask.

    Returns:
        ``(members, 1, rows * repeat, keys)``.
    """
    seen = ragged_visibility(visibility, num_rows, num_keys, rows, keys)
    return additive(seen.repeat_interleave(repeat, 1), dtype).unsqueeze(1)


def ragged_visibility(visibility: Visibility, num_rows: Tensor, num_keys: Tensor, rows: int, keys: int) -> Tensor:
    """Return which rows see which keys, ``(members, rows, keys)``; arguments as for `ragged_mask`."""
    row = torch.minimum(torch.arange(rows, device=num_rows.device), num_rows.unsqueeze(1) - 1)
    position = row + (num_keys - num_rows).unsqueeze(1)
    key = torch.arange(keys, device=num_rows.device)
    return visibility.of(key - position.unsqueeze(2)) & (key < num_keys.unsqueeze(1)).unsqueeze(1)


@frozen(eq=False)
class AlibiMask:
    """
    What the written-out kernel reads of a tile where ALiBi was asked for. The slopes are the layer's.

    Attributes:
        mask: ``(members or 1, 1, rows * ratio, keys)`` additive; None where every row sees every key.
        far: ``(members or 1, rows, keys)`` float32: what a slope is multiplied with.
    """

    mask: Tensor | None
    far: Tensor


def bend(distance: Tensor, form: str | None) -> Tensor:
    """Return what a slope is multiplied with, in float32, given distances of either sign. The form is that of ALiBi."""
    far = distance.abs().float()
    return far.sqrt_() if form == "sqrt" else far


class Distances:
    """
    One picture of distances from which every tile of equally long requests takes a slice, as from a mask's template.

    Args:
        form: "linear" or "sqrt".
        rows: Query positions of a tile.
        distances: The smallest distance between a key and a tile's first query, and the largest one plus 1.
        device: Where it lives.
    """

    def __init__(self, form: str | None, rows: int, distances: tuple[int, int], *, device: torch.device) -> None:
        self._low = distances[0]
        distance = torch.arange(*distances, device=device) - torch.arange(rows, device=device).unsqueeze(1)
        self._far = bend(distance, form)

    def tile(self, rows: int, start: int, end: int) -> Tensor:
        """Return ``(1, rows, end - start)``, for keys at such distances from the first row."""
        return self._far[None, :rows, start - self._low : end - self._low]


def ragged_distances(num_rows: Tensor, num_keys: Tensor, rows: int, keys: int, form: str | None) -> Tensor:
    """
    Return the distances of a group whose members differ in length. Rows beyond a member's own repeat its last one.

    Args:
        num_rows: ``(members,)`` rows per member.
        num_keys: ``(members,)`` keys per member; its last row stands at its last key.
        rows: The most rows.
        keys: The most keys.
        form: "linear" or "sqrt".

    Returns:
        ``(members, rows, keys)``.
    """
    row = torch.minimum(torch.arange(rows, device=num_rows.device), num_rows.unsqueeze(1) - 1)
    position = row + (num_keys - num_rows).unsqueeze(1)
    return bend(torch.arange(keys, device=num_rows.device) - position.unsqueeze(2), form)


def lower(scores: Tensor, slopes: Tensor, far: Tensor) -> Tensor:
    """
    Take ``slope * far`` off the scores, in place.

    Args:
        scores: ``(members, num_kv_heads, rows * ratio, keys)``.
        slopes: ``(num_q_heads,)``.
        far: ``(members or 1, rows, keys)``.
    """
    members, heads, _, keys = scores.shape
    ratio = slopes.shape[0] // heads
    per_head = scores.view(members, heads, -1, ratio, keys)
    per_head.addcmul_(slopes.view(1, heads, 1, ratio, 1), far[:, None, :, None, :], value=-1)
    return scores


@frozen(eq=False)
class CustomMask:
    """
    A batch's mask.

    Attributes:
        flat: ``(sum(query_len * seq_len),)`` bool, the requests' masks one after another, True attends.
        query_lens: Query rows per request.
        seq_lens: Keys per request.
        index: Puts integers onto the device.
    """

    flat: Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    index: Callable[[list[int]], Tensor]
    _starts: list[int] = field(init=False)
    _first_rows: list[int] = field(init=False)

    @_starts.default
    def _find_starts(self) -> list[int]:
        sizes = (rows * keys for rows, keys in zip(self.query_lens, self.seq_lens, strict=True))
        return [0, *accumulate(sizes)]

    @_first_rows.default
    def _find_first_rows(self) -> list[int]:
        return [0, *accumulate(self.query_lens)]

    def of(self, group: list[Segment], lens: Tensor, rows: int, keys: int) -> Tensor:
        """
        Return a group's part, ``(members, rows, keys)``. Rows and keys beyond a member's own repeat its last ones.

        Args:
            group: Its members.
            lens: ``(2, members)`` rows and keys of each.
            rows: The most rows.
            keys: The most keys.
        """
        firsts = [self._first(segment) for segment in group]
        first, width = self.index([*firsts, *(self.seq_lens[segment.request] for segment in group)]).view(2, -1, 1)
        row = torch.minimum(torch.arange(rows, device=lens.device), lens[0].unsqueeze(1) - 1)
        key = torch.minimum(torch.arange(keys, device=lens.device), lens[1].unsqueeze(1) - 1)
        return self.flat[(first + row * width).unsqueeze(2) + key.unsqueeze(1)]

    def _first(self, segment: Segment) -> int:
        """Where the span's first row meets its first key."""
        row = segment.first_row - self._first_rows[segment.request]
        return self._starts[segment.request] + row * self.seq_lens[segment.request] + segment.first_key


class Tiler:
    """
    Cuts the groups of one batch.

    Groups whose members are equally long share templates, which are made here. Others get pictures of their own.

    Args:
        shape: What planning knows of the layers.
        groups: All groups of the batch.
        custom: The mask that came with the batch, or None.
        index: Puts integers onto the device.
        device: The device.
    """

    def __init__(
        self,
        shape: PlanParams,
        groups: Sequence[list[Segment]],
        custom: CustomMask | None,
        index: Callable[[list[int]], Tensor],
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._custom = custom
        self._index = index
        self._device = device
        even = [] if shape.kernel.make_mask or custom else [group for group in groups if is_uniform(group)]
        self._template = self._make_template(even)
        self._distances = self._make_distances(even) if shape.alibi and even else None

    def tiles(self, group: list[Segment], rows: int, keys: int) -> list[Tile]:
        """Return the kernel calls of a group of so many rows and keys, padding included."""
        make_mask = self._shape.kernel.make_mask
        if make_mask is not None:
            mask = make_mask(self._shape.visibility, self._lens(group), rows, keys, self._shape.ratio)
            return [Tile((0, rows), (0, keys), mask)]
        if self._custom is not None:
            return self._custom_tiles(self._custom, group, rows, keys)
        if is_uniform(group):
            return self._even_tiles(self._shape.members_per_gather(len(group), keys), rows, keys)
        return self._ragged_tiles(group, rows, keys)

    def _lens(self, group: list[Segment]) -> Tensor:
        return self._index([*(segment.rows for segment in group), *(segment.keys for segment in group)]).view(2, -1)

    # -- groups whose members differ ---------------------------------------------------------------------------------

    def _ragged_tiles(self, group: list[Segment], rows: int, keys: int) -> list[Tile]:
        shape, lens = self._shape, self._lens(group)
        mask = ragged_mask(shape.visibility, lens[0], lens[1], rows, keys, repeat=shape.ratio, dtype=shape.mask_dtype)
        return self._masked_tiles(len(group), lens, mask, rows, keys)

    def _custom_tiles(self, custom: CustomMask, group: list[Segment], rows: int, keys: int) -> list[Tile]:
        """A row that the mask leaves nothing to attends everything, and its result is thrown away."""
        shape, lens = self._shape, self._lens(group)
        seen = ragged_visibility(shape.visibility, lens[0], lens[1], rows, keys) & custom.of(group, lens, rows, keys)
        fully_masked = ~seen.any(-1)
        mask = additive(
            (seen | fully_masked.unsqueeze(2)).repeat_interleave(shape.ratio, 1), shape.mask_dtype
        ).unsqueeze(1)
        return self._masked_tiles(len(group), lens, mask, rows, keys, fully_masked)

    def _masked_tiles(
        self, members: int, lens: Tensor, mask: Tensor, rows: int, keys: int, fully_masked: Tensor | None = None
    ) -> list[Tile]:
        far = ragged_distances(lens[0], lens[1], rows, keys, self._shape.alibi) if self._shape.alibi else None
        tiles = []
        for start, end in self._cuts(members, rows, keys):
            part: Any = mask[:, :, start * self._shape.ratio : end * self._shape.ratio]
            part = part if far is None else AlibiMask(part, far[:, start:end])
            tiles.append(
                Tile(
                    (start, end),
                    (0, keys),
                    part,
                    fully_masked=None if fully_masked is None else fully_masked[:, start:end],
                )
            )
        return tiles

    # -- groups whose members are equally long -----------------------------------------------------------------------

    def _even_tiles(self, members: int, rows: int, keys: int) -> list[Tile]:
        if self._is_square(rows, keys):
            return [Tile((0, rows), (0, keys), causal=True)]
        return [self._even_tile(cut, rows, keys) for cut in self._cuts(members, rows, keys)]

    def _even_tile(self, cut: tuple[int, int], rows: int, keys: int) -> Tile:
        reach, mask = self._reach(cut, rows, keys), None
        count, first = cut[1] - cut[0], cut[0] + keys - rows
        near = (reach[0] - first, reach[1] - first)
        if self._template is not None and count > 1 and self._shape.visibility.binds(rows, keys):
            mask = self._template.tile(count, *near)
        if self._distances is None:
            return Tile(cut, reach, mask)
        return Tile(cut, reach, AlibiMask(mask, self._distances.tile(count, *near)))

    def _is_square(self, rows: int, keys: int) -> bool:
        visibility = self._shape.visibility
        return (
            self._shape.kernel.fused
            and 1 < rows == keys
            and visibility.right == 0
            and not 0 <= visibility.left < keys - 1
        )

    def _cuts(self, members: int, rows: int, keys: int) -> list[tuple[int, int]]:
        step = self._shape.rows_per_tile(members, keys)
        return [(start, min(rows, start + step)) for start in range(0, rows, step)]

    def _reach(self, cut: tuple[int, int], rows: int, keys: int) -> tuple[int, int]:
        """Return the keys ``(first, last + 1)`` that the rows of an even tile see."""
        visibility, shift = self._shape.visibility, keys - rows
        low = max(0, cut[0] + shift - visibility.left) if visibility.left >= 0 else 0
        high = min(keys, cut[1] + shift + visibility.right) if visibility.right >= 0 else keys
        return low, high

    # -- what they share ---------------------------------------------------------------------------------------------

    def _make_template(self, groups: list[list[Segment]]) -> MaskTemplate | None:
        """Return a mask that every tile of every even group finds its own in, or None where none needs one."""
        shape = self._shape
        bound = [
            group
            for group in groups
            if shape.visibility.binds(group[0].rows, group[0].keys)
            and not self._is_square(group[0].rows, group[0].keys)
        ]
        rows, distances = self._extent(bound)
        if rows == 1:
            return None
        return MaskTemplate(
            shape.visibility, rows, distances, repeat=shape.ratio, dtype=shape.mask_dtype, device=self._device
        )

    def _make_distances(self, groups: list[list[Segment]]) -> Distances:
        return Distances(self._shape.alibi, *self._extent(groups), device=self._device)

    def _extent(self, groups: list[list[Segment]]) -> tuple[int, tuple[int, int]]:
        """Return the most rows of a tile, and the distances of the keys from its first row: ``(least, most + 1)``."""
        low, high, most_rows = 0, 0, 1
        for group in groups:
            rows, keys = group[0].rows, group[0].keys
            for cut in self._cuts(self._shape.members_per_gather(len(group), keys), rows, keys):
                first, reach = cut[0] + keys - rows, self._reach(cut, rows, keys)
                low, high = min(low, reach[0] - first), max(high, reach[1] - first)
                most_rows = max(most_rows, cut[1] - cut[0])
        return most_rows, (low, high)


def is_uniform(group: list[Segment]) -> bool:
    """Whether all members are equally long."""
    return len(group) == 1 or all(segment.rows == group[0].rows and segment.keys == group[0].keys for segment in group)


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
    fully_masked: Tensor | None = None
