"""What a layer multiplies with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class Scales:
    """
    The scales of a layer.

    Attributes:
        scores: Factor of the scores, greater than 0.
        keys: Of the keys in an 8-bit cache, one float32; None for 1.
        values: Of the values there, likewise.
    """

    scores: float
    keys: Tensor | None = None
    values: Tensor | None = None
