"""Measured times of candidates, for the charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug.request import parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterable


@frozen
class Timed:
    """
    One measured time.

    Attributes:
        what: What was measured; candidates with the same text are in one chart.
        candidate: ``backend/variant``.
        microseconds: The time.
        source: The file that has it, or a text about the measurement.
    """

    what: str
    candidate: str
    microseconds: float
    source: str


def times_of_profile(path: str | None) -> tuple[Timed, ...]:
    """Return the times of the profile that selection reads, which is valid; nothing without a file of TOML."""
    if path is None or Path(path).suffix != ".toml":
        return ()
    tables = parse_toml(Path(path).read_text("utf-8"))["measured"]
    source = Path(path).name  # a report may be published: the folder is not part of it
    return tuple(
        Timed(_what(table.get("when", {})), candidate, float(time), source)
        for table in tables
        for candidate, time in table["microseconds"].items()
    )


def charts(times: Iterable[Timed]) -> dict[str, list[Timed]]:
    """Return the times of each chart, the fastest first, by what was measured."""
    found: dict[str, list[Timed]] = {}
    for each in times:
        found.setdefault(each.what, []).append(each)
    return {what: sorted(group, key=lambda one: (one.microseconds, one.candidate)) for what, group in found.items()}


def _what(when: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in when.items()) or "every request"
