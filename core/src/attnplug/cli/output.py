"""Writing to standard output: text, JSON, or a table where a person reads it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

WIDEST: Final = 120
"""Columns beyond which lines are hard to read."""


def say(text: str = "") -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")


def say_json(data: Any) -> None:
    """Write one JSON document."""
    import json  # noqa: PLC0415 - only for those who ask for JSON

    say(json.dumps(data, indent=2))


def complain(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{text}\n")


def is_terminal() -> bool:
    """Whether a person reads the output: then tables and colors, otherwise plain text."""
    return sys.stdout.isatty()


def console() -> Console:
    """Return rich's view of the terminal, which honors NO_COLOR, TERM and COLUMNS."""
    from rich.console import Console  # noqa: PLC0415 - costs 60 ms, and plain output does without

    found = Console(highlight=False)
    found.width = min(found.width, WIDEST)
    return found


def make_printable() -> None:
    """Let text through that the output's encoding does not have, as escapes, instead of failing half-way."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
