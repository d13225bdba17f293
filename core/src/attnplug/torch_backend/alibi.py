"""ALiBi: how far keys lie from queries, and what that takes off their scores."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Slanted:
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
