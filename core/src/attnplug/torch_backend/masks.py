"""Which query sees which key, as additive masks: 0 where it does, -inf where it does not."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Sight:
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


class Template:
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
        sight: Sight,
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
        self._mask = additive(sight.of(distance).repeat_interleave(repeat, 0), dtype)

    def tile(self, rows: int, start: int, end: int) -> Tensor:
        """Return ``(1, 1, rows * repeat, end - start)``, for keys at such distances from the first row."""
        return self._mask[None, None, : rows * self._repeat, start - self._low : end - self._low]


def ragged_mask(
    sight: Sight, num_rows: Tensor, num_keys: Tensor, rows: int, keys: int, *, repeat: int, dtype: torch.dtype
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
    seen = ragged_sight(sight, num_rows, num_keys, rows, keys)
    return additive(seen.repeat_interleave(repeat, 1), dtype).unsqueeze(1)


def ragged_sight(sight: Sight, num_rows: Tensor, num_keys: Tensor, rows: int, keys: int) -> Tensor:
    """Return which rows see which keys, ``(members, rows, keys)``; arguments as for `ragged_mask`."""
    row = torch.minimum(torch.arange(rows, device=num_rows.device), num_rows.unsqueeze(1) - 1)
    position = row + (num_keys - num_rows).unsqueeze(1)
    key = torch.arange(keys, device=num_rows.device)
    return sight.of(key - position.unsqueeze(2)) & (key < num_keys.unsqueeze(1)).unsqueeze(1)
