"""Cuts groups into kernel calls, each with the picture of who sees whom that its kernel reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.torch_backend.alibi import Distances, Slanted, ragged_distances
from attnplug.torch_backend.masks import Template, additive, ragged_mask, ragged_sight
from attnplug.torch_backend.plan import Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from attnplug.torch_backend.custom import CustomMask
    from attnplug.torch_backend.grouping import Span
    from attnplug.torch_backend.shape import Shape


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
        shape: Shape,
        groups: Sequence[list[Span]],
        custom: CustomMask | None,
        index: Callable[[list[int]], Tensor],
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._custom = custom
        self._index = index
        self._device = device
        even = [] if shape.kernel.make_mask or custom else [group for group in groups if is_even(group)]
        self._template = self._make_template(even)
        self._distances = self._make_distances(even) if shape.alibi and even else None

    def tiles(self, group: list[Span], rows: int, keys: int) -> list[Tile]:
        """Return the kernel calls of a group of so many rows and keys, padding included."""
        make_mask = self._shape.kernel.make_mask
        if make_mask is not None:
            mask = make_mask(self._shape.sight, self._lens(group), rows, keys, self._shape.ratio)
            return [Tile((0, rows), (0, keys), mask)]
        if self._custom is not None:
            return self._custom_tiles(self._custom, group, rows, keys)
        if is_even(group):
            return self._even_tiles(self._shape.members_at_once(len(group), keys), rows, keys)
        return self._ragged_tiles(group, rows, keys)

    def _lens(self, group: list[Span]) -> Tensor:
        return self._index([*(span.rows for span in group), *(span.keys for span in group)]).view(2, -1)

    # -- groups whose members differ ---------------------------------------------------------------------------------

    def _ragged_tiles(self, group: list[Span], rows: int, keys: int) -> list[Tile]:
        shape, lens = self._shape, self._lens(group)
        mask = ragged_mask(shape.sight, lens[0], lens[1], rows, keys, repeat=shape.ratio, dtype=shape.mask_dtype)
        return self._masked_tiles(len(group), lens, mask, rows, keys)

    def _custom_tiles(self, custom: CustomMask, group: list[Span], rows: int, keys: int) -> list[Tile]:
        """A row that the mask leaves nothing to attends everything, and its result is thrown away."""
        shape, lens = self._shape, self._lens(group)
        seen = ragged_sight(shape.sight, lens[0], lens[1], rows, keys) & custom.of(group, lens, rows, keys)
        blind = ~seen.any(-1)
        mask = additive((seen | blind.unsqueeze(2)).repeat_interleave(shape.ratio, 1), shape.mask_dtype).unsqueeze(1)
        return self._masked_tiles(len(group), lens, mask, rows, keys, blind)

    def _masked_tiles(
        self, members: int, lens: Tensor, mask: Tensor, rows: int, keys: int, blind: Tensor | None = None
    ) -> list[Tile]:
        far = ragged_distances(lens[0], lens[1], rows, keys, self._shape.alibi) if self._shape.alibi else None
        tiles = []
        for start, end in self._cuts(members, rows, keys):
            part: Any = mask[:, :, start * self._shape.ratio : end * self._shape.ratio]
            part = part if far is None else Slanted(part, far[:, start:end])
            tiles.append(Tile((start, end), (0, keys), part, blind=None if blind is None else blind[:, start:end]))
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
        if self._template is not None and count > 1 and self._shape.sight.binds(rows, keys):
            mask = self._template.tile(count, *near)
        if self._distances is None:
            return Tile(cut, reach, mask)
        return Tile(cut, reach, Slanted(mask, self._distances.tile(count, *near)))

    def _is_square(self, rows: int, keys: int) -> bool:
        sight = self._shape.sight
        return self._shape.kernel.fused and 1 < rows == keys and sight.right == 0 and not 0 <= sight.left < keys - 1

    def _cuts(self, members: int, rows: int, keys: int) -> list[tuple[int, int]]:
        step = self._shape.rows_per_tile(members, keys)
        return [(start, min(rows, start + step)) for start in range(0, rows, step)]

    def _reach(self, cut: tuple[int, int], rows: int, keys: int) -> tuple[int, int]:
        """Return the keys ``(first, last + 1)`` that the rows of an even tile see."""
        sight, shift = self._shape.sight, keys - rows
        low = max(0, cut[0] + shift - sight.left) if sight.left >= 0 else 0
        high = min(keys, cut[1] + shift + sight.right) if sight.right >= 0 else keys
        return low, high

    # -- what they share ---------------------------------------------------------------------------------------------

    def _make_template(self, groups: list[list[Span]]) -> Template | None:
        """Return a mask that every tile of every even group finds its own in, or None where none needs one."""
        shape = self._shape
        bound = [
            group
            for group in groups
            if shape.sight.binds(group[0].rows, group[0].keys) and not self._is_square(group[0].rows, group[0].keys)
        ]
        rows, distances = self._extent(bound)
        if rows == 1:
            return None
        return Template(shape.sight, rows, distances, repeat=shape.ratio, dtype=shape.mask_dtype, device=self._device)

    def _make_distances(self, groups: list[list[Span]]) -> Distances:
        return Distances(self._shape.alibi, *self._extent(groups), device=self._device)

    def _extent(self, groups: list[list[Span]]) -> tuple[int, tuple[int, int]]:
        """Return the most rows of a tile, and the distances of the keys from its first row: ``(least, most + 1)``."""
        low, high, most_rows = 0, 0, 1
        for group in groups:
            rows, keys = group[0].rows, group[0].keys
            for cut in self._cuts(self._shape.members_at_once(len(group), keys), rows, keys):
                first, reach = cut[0] + keys - rows, self._reach(cut, rows, keys)
                low, high = min(low, reach[0] - first), max(high, reach[1] - first)
                most_rows = max(most_rows, cut[1] - cut[0])
        return most_rows, (low, high)


def is_even(group: list[Span]) -> bool:
    """Whether all members are equally long."""
    return len(group) == 1 or all(span.rows == group[0].rows and span.keys == group[0].keys for span in group)
