"""Where calls went: the counts of each operator, the backend or torch's own operator behind it, and why."""

from __future__ import annotations

import threading
from typing import Final

from attrs import frozen

SDPA: Final = "scaled_dot_product_attention"
VARLEN: Final = "varlen_attn"
VARLEN_BACKWARD: Final = "varlen_attn backward"
OWN: Final = "torch's own operator"


@frozen
class Route:
    """
    Where calls went.

    Attributes:
        operator: What was called: ``"scaled_dot_product_attention"``, ``"varlen_attn"``, ``"varlen_attn backward"``.
        device: The type of the device: ``"cpu"`` or ``"cuda"``.
        backend: The candidate of attnplug that ran, ``backend/variant``; ``attnplug.dense`` for gradients that core
            computes; None for torch's own operator, and where the call was refused.
        reason: Why no backend ran, in a sentence; empty where one did.
        refused: Whether the call was refused: torch has no operator of its own for it on this device.
        calls: How many calls; 0 where this is a forecast.
    """

    operator: str
    device: str
    backend: str | None = None
    reason: str = ""
    refused: bool = False
    calls: int = 0

    def __str__(self) -> str:
        where = self.backend or ("refused" if self.refused else OWN)
        counted = f"{self.calls} × " if self.calls else ""  # noqa: RUF001 - as it is written
        return f"{counted}{self.operator} on {self.device}: {where}{f' ({self.reason})' if self.reason else ''}"


_MOST: Final = 256
"""Separate routes that are counted; a reason may have numbers of the call in it."""
_REST: Final = "for other reasons, of which too many were counted"
_counts: Final[dict[tuple[str, str, str | None, str, bool], int]] = {}
_lock: Final = threading.Lock()


def count(operator: str, device: str, backend: str | None, reason: str = "", *, refused: bool = False) -> None:
    """Count a call; the arguments are those of `Route`."""
    key = (operator, device, backend, reason, refused)
    with _lock:  # adding to an entry is not atomic
        if key not in _counts and len(_counts) >= _MOST:
            key = (operator, device, backend, _REST if reason else "", refused)
        _counts[key] = _counts.get(key, 0) + 1


def report() -> tuple[Route, ...]:
    """
    Return where the calls of this process went since the last `reset`, most calls first.

    Calls that a backend of attnplug makes of torch's operators are no calls of their own. A compiled graph calls the
    operators that torch chose when it was traced: what torch did not give to a flash operator is counted then, and
    what it did, each time that the graph runs.
    """
    with _lock:
        counted = list(_counts.items())
    routes = [Route(*key, calls) for key, calls in counted]
    return tuple(sorted(routes, key=lambda one: (-one.calls, one.operator, one.device, one.backend or "", one.reason)))


def reset() -> None:
    """Count from zero."""
    with _lock:
        _counts.clear()
