"""What ``import attnplug`` costs a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.cli.bench.interpreter import interpreter
from attnplug.cli.bench.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "import"
_CODES: Final = (
    ("import attnplug", "`import attnplug`", 40.0),
    (
        "from attnplug import Device, Requirements, select",
        "`from attnplug import Device, Requirements, select`: what the lazy import puts off until the first use",
        None,
    ),
)


def measure(repeats: int) -> Iterator[Measurement]:
    """Measure whole processes; each sample is the difference between one that imports and one that does nothing."""
    with interpreter() as python:
        for code, what, budget in _CODES:
            python.seconds("-c", code)  # compiles what is not compiled yet
            pairs = [(python.seconds("-c", "pass"), python.seconds("-c", code)) for _ in range(repeats)]
            samples = tuple(importing - bare for bare, importing in pairs)
            yield Measurement(NAME, f"{what}, over a process that does nothing", samples, "ms", budget)
