"""What a packed call lets a query attend to: torch's window of two sides, as a backend takes it."""

from __future__ import annotations

from typing import NamedTuple

from attnplug_torch.decisions import RefusedError


class Visibility(NamedTuple):
    """
    What a query attends to.

    Attributes:
        causal: No later key; the last query is at the last key.
        window: Keys on the left, itself included; without `causal` as many on the right. None for all.
    """

    causal: bool
    window: int | None


def visibility_of(left: int | None, right: int | None, *, is_causal: bool) -> Visibility:
    """
    Return what torch's arguments say.

    Args:
        left: Keys before a query that it attends to; None or negative for all.
        right: The same after it.
        is_causal: Whether it attends to none after it, whatever `right` is.

    Raises:
        RefusedError: The sides are different, and none is closed.
    """
    before = None if left is None or left < 0 else left
    after = 0 if is_causal else None if right is None or right < 0 else right
    is_causal = after == 0
    if is_causal or before == after:
        return Visibility(is_causal, None if before is None else before + 1)
    raise RefusedError(
        f"window_size=({_shown(before)}, {_shown(after)}): a window has equal sides, or ends at its query"
    )


def _shown(side: int | None) -> int:
    return -1 if side is None else side
