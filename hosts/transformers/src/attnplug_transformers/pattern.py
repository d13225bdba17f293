"""What negotiated attention lets a token attend: the yardstick that the library's masks are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.request import Requirements


@frozen
class Pattern:
    """
    Which keys a query attends, by position alone.

    Attributes:
        causal: No later ones.
        left: At most so many earlier ones; None for all.
        right: At most so many later ones; None for all.
        chunk: Only those of the query's own chunk, of so many tokens; None for no chunks.
    """

    causal: bool
    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, requirements: Requirements) -> Pattern:
        """Return what these requirements say. A window is left ``w - 1``; encoders look as far to the right."""
        width = requirements.sliding_window
        left = None if width is None else width - 1
        right = left if requirements.attn_type == "encoder_only" else None
        return cls(bool(requirements.causal), left, right, requirements.attention_chunk)

    @property
    def is_local(self) -> bool:
        """Whether positions matter beyond causality."""
        return self.left is not None or self.chunk is not None

    def attends(self, queries: Tensor, keys: Tensor) -> Tensor:
        """
        Return who attends whom.

        Args:
            queries: Positions of the queries, broadcast against `keys`.
            keys: Positions of the keys.
        """
        seen = torch.ones((), dtype=torch.bool, device=keys.device)
        if self.causal:
            seen = seen & (keys <= queries)
        if self.left is not None:
            seen = seen & (queries - keys <= self.left)
        if self.right is not None:
            seen = seen & (keys - queries <= self.right)
        if self.chunk is not None:
            # Floor division, so that what stands before the first key has a chunk of its own.
            seen = seen & (
                queries.div(self.chunk, rounding_mode="floor") == keys.div(self.chunk, rounding_mode="floor")
            )
        return seen

    def __str__(self) -> str:
        words = ["causal" if self.causal else "bidirectional", "attention"]
        if self.left is not None:
            words.append(f"with a window of {self.left + 1}" + ("" if self.causal else " to each side"))
        if self.chunk is not None:
            words.append(f"in chunks of {self.chunk}")
        return " ".join(words)
