"""What a layer asks of every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import AttentionImpl


@frozen(eq=False)
class Terms:
    """
    The terms of a layer's scores.

    Attributes:
        scale: Factor of the scores.
        left: Tokens attended before a token's own; -1 for all.
        soft_cap: Scores become ``cap * tanh(score / cap)``; 0 for none.
        slopes: ``(num_q_heads,)`` float32 of ALiBi, contiguous, or None.
        is_sqrt: Whether the slopes are factors of the distance's square root.
    """

    scale: float
    left: int = -1
    soft_cap: float = 0.0
    slopes: Tensor | None = None
    is_sqrt: bool = False

    @classmethod
    def of(cls, impl: AttentionImpl) -> Terms:
        """Return the terms of a layer."""
        slopes = impl.layer.alibi_slopes
        return cls(
            scale=impl.scale,
            left=impl.window[0],
            soft_cap=impl.logits_soft_cap or 0.0,
            slopes=None if slopes is None else slopes.contiguous(),
            is_sqrt=impl.agreement.requirements.alibi == "sqrt",
        )
