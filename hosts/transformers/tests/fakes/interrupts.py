"""Raises KeyboardInterrupt at a chosen traced line, as Ctrl-C does at any."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType, ModuleType

Place: TypeAlias = tuple[str, int, int]
"""A file, a line of it, and which of the times that this line runs, from 1 on."""

_tracers: list[Callable[..., object] | None] = []
"""Of each `traced` that is entered, the innermost one last; None where nothing is left to trace."""


@contextmanager
def traced(modules: Sequence[ModuleType], visit: Callable[[Place], None]) -> Iterator[None]:
    """Call `visit` before each line of these modules that runs."""
    files = {module.__file__ for module in modules}
    seen = Counter[tuple[str, int]]()

    def each_line(frame: FrameType, event: str, _: object):
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            seen[line] += 1
            visit((*line, seen[line]))
        return each_line

    def each_call(frame: FrameType, _event: str, _: object):
        return each_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    _tracers.append(each_call)
    sys.settrace(each_call)
    try:
        yield
    finally:
        _tracers.pop()
        sys.settrace(before)


def resume() -> None:
    """Go on after an interrupt: Python ends the tracing where a trace function raises."""
    if _tracers:
        sys.settrace(_tracers[-1])


def places(modules: Sequence[ModuleType], run: Callable[[], object]) -> list[Place]:
    """Return each line that runs, each time that it does, in order."""
    found: list[Place] = []
    with traced(modules, found.append):
        run()
    return found


@contextmanager
def interrupted(modules: Sequence[ModuleType], *at: Place) -> Iterator[list[Place]]:
    """Raise KeyboardInterrupt at these places, each once, and yield those that were reached."""
    reached: list[Place] = []

    def visit(place: Place) -> None:
        if place in at:
            reached.append(place)
            if len(reached) == len(at):
                _tracers[-1] = None
            raise KeyboardInterrupt

    with traced(modules, visit):
        yield reached
