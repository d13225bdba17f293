"""One engine serves one thread, one call at a time."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attnplug.errors import LimitsError

if TYPE_CHECKING:
    from collections.abc import Iterator


class OneCaller:
    """Lets one call in, and refuses another that comes meanwhile instead of letting it wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """
        Run the body alone.

        Raises:
            LimitsError: Another call is under way.
        """
        if not self._lock.acquire(blocking=False):
            raise LimitsError(
                f"{name}() was called while another call of this engine was under way",
                "one engine serves one thread, one call at a time",
                "call it from the thread that steps the engine, or make an engine for each thread",
            )
        try:
            yield
        finally:
            self._lock.release()
