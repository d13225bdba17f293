"""What ``import attnplug`` costs a process."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from attnplug_kit.bench.interpreter import interpreter
from attnplug_kit.bench.measurement import Measurement

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
    """Measure whole processes in turn; each sample is one that imports, less the median of those that do nothing."""
    with interpreter() as python:
        for code, what, budget in _CODES:
            python.seconds("-c", code)  # compiles what is not compiled yet
            pairs = [(python.seconds("-c", "pass"), python.seconds("-c", code)) for _ in range(repeats)]
            nothing = statistics.median(bare for bare, _ in pairs)
            samples = tuple(importing - nothing for _, importing in pairs)
            yield Measurement(NAME, f"{what}, over a process that does nothing", samples, "ms", budget)
