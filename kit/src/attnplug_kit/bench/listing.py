"""What ``attnplug list --json`` takes from its start to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug_kit.bench.interpreter import interpreter
from attnplug_kit.bench.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "list"
_COMMAND: Final = "import sys; from attnplug.cli.main import main; sys.exit(main(['list', '--json']))"


def measure(repeats: int) -> Iterator[Measurement]:
    """Measure whole processes that do what the installed command does."""
    with interpreter() as python:
        python.seconds("-c", _COMMAND)
        samples = tuple(python.seconds("-c", _COMMAND) for _ in range(repeats))
        yield Measurement(
            NAME, "`attnplug list --json`, the whole process, with what is installed", samples, "ms", 130.0
        )
