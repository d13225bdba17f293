"""Refuses concurrent calls of an engine."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from attnplug.errors import LimitsError

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Self


class ExclusiveCall:
    """
    Admits one call at a time, and refuses a concurrent one instead of blocking it.

    A call lasts as long as its frame runs. So no interrupt leaves the engine locked, as it can between a lock and the
    ``try`` behind it: a frame that was left without `__exit__` no longer runs.
    """

    def __init__(self) -> None:
        self._frames: list[FrameType] = []

    def enter(self, name: str) -> Self:
        """
        Return a context manager: the calling function runs its body exclusively.

        Raises:
            LimitsError: Another call has not returned yet.
        """
        frame = sys._getframe(1)  # noqa: SLF001 - CPython's, which torch requires
        self._frames.append(frame)  # before the check: of two threads at least one sees the other
        for other in self._frames[:]:
            if other is frame:
                continue
            if _is_running(other):
                self._remove(frame)
                raise LimitsError(
                    f"{name}() was called during another call of this engine",
                    "one engine serves one thread, one call at a time",
                    "call it from the thread that steps the engine, or make an engine for each thread",
                )
            self._remove(other)
        return self

    def __enter__(self) -> None:
        """Nothing is left to do: `enter` has admitted the call."""

    def __exit__(self, *_: object) -> None:
        self._remove(sys._getframe(1))  # noqa: SLF001 - likewise

    def _remove(self, frame: FrameType) -> None:
        with suppress(ValueError):  # another thread has removed it
            self._frames.remove(frame)


def _is_running(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # documented: a frame that is executing cannot be cleared
        return True
    return False
