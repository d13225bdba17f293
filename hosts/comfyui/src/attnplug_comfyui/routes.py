"""Where the attention calls of a model went: counts of each backend, or of ComfyUI's own function, and why."""

from __future__ import annotations

import logging
import threading
from typing import Final

from attrs import frozen

_logger: Final = logging.getLogger("attnplug.comfyui")
_MOST: Final = 256
"""Separate routes that are counted; a reason may have numbers of the call in it."""
_REST: Final = "for other reasons, of which too many were counted"


@frozen
class Route:
    """
    Where calls went.

    Attributes:
        replaced: ComfyUI's function that the model called, such as ``"attention_pytorch"``.
        backend: The candidate of attnplug that ran, ``backend/variant``; None where none did.
        dtype: What the call was computed in, such as ``"bfloat16"``.
        reason: Why no backend ran, in a sentence; empty where one did.
        refused: Whether the call was an error: no backend serves it, and ComfyUI's function was not permitted.
        calls: How many calls.
    """

    replaced: str
    backend: str | None = None
    dtype: str = ""
    reason: str = ""
    refused: bool = False
    calls: int = 0

    def __str__(self) -> str:
        own = f"ComfyUI's {self.replaced}"
        where = "refused" if self.refused else f"by {self.backend or own}"
        instead = f", in place of {own}" if self.backend else ""
        counted = f"{self.calls} × " if self.calls else ""  # noqa: RUF001 - as it is written
        return f"{counted}{where} in {self.dtype}{instead}{f' ({self.reason})' if self.reason else ''}"


class RouteCounts:
    """Counts the calls of one override. Each new route is logged once."""

    def __init__(self) -> None:
        self._counts: dict[Route, int] = {}
        self._lock = threading.Lock()

    def count(self, route: Route) -> None:
        """Count a call; `route` has no count."""
        with self._lock:  # adding to an entry is not atomic, and several GPUs have a thread each
            if route not in self._counts and len(self._counts) >= _MOST:
                route = Route(route.replaced, route.backend, route.dtype, route.reason and _REST, route.refused)
            is_new = route not in self._counts
            self._counts[route] = self._counts.get(route, 0) + 1
        if is_new:
            permit = "; the node's input fallback permits ComfyUI's own function" if route.refused else ""
            _logger.log(logging.INFO if route.backend else logging.WARNING, "attnplug: attention %s%s", route, permit)

    def routes(self) -> tuple[Route, ...]:
        """Return where calls went since the last `reset`, most calls first."""
        with self._lock:
            counted = list(self._counts.items())
        routes = [Route(one.replaced, one.backend, one.dtype, one.reason, one.refused, calls) for one, calls in counted]
        return tuple(sorted(routes, key=lambda one: (-one.calls, str(one))))

    def reset(self) -> None:
        """Count from zero; routes are logged once more."""
        with self._lock:
            self._counts.clear()
