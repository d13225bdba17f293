"""Measured times of candidates, for the charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.evidence import merged, parse_entries
from attnplug.request import parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug.evidence import ProfileEntry

_OFF: Final = "off"
_PIN: Final = "#sha256="
"""How the setting says that no profile counts, and pins the content of one."""


@frozen
class Timed:
    """
    One measured time.

    Attributes:
        what: What was measured; candidates with the same text are in one chart.
        candidate: ``backend/variant``.
        microseconds: The time.
        source: Date and library versions of the measurement, or the file that has it.
    """

    what: str
    candidate: str
    microseconds: float
    source: str


def times_of_profile(setting: str | None) -> tuple[Timed, ...]:
    """
    Return the times of the profile that selection reads: a folder or a file of entries, or a file of TOML.

    Args:
        setting: The value of the setting ``profile``, which selection has read without an error.
    """
    if setting in (None, _OFF):
        return ()
    path = Path(str(setting).partition(_PIN)[0])
    if path.is_dir():
        return tuple(_of_entries(merged(_entries_in(path))))
    text = path.read_text("utf-8")
    if text.lstrip().startswith("{"):
        return tuple(_of_entries(merged(parse_entries(text))))
    return tuple(_of_tables(parse_toml(text)["measured"], path.name))


def _entries_in(folder: Path) -> Iterator[ProfileEntry]:
    """Yield the entries of each file. Files that are no entries are left out, as in selections."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield from parse_entries(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue


def _of_entries(entries: Iterable[ProfileEntry]) -> Iterator[Timed]:
    for entry in entries:
        for candidate, time in entry.times.items():
            libraries = "".join(f", {name} {version}" for name, version in sorted(time.libraries.items()))
            yield Timed(_chart_of(entry), candidate, time.layer_us, f"{entry.measured_on}{libraries}")


def _chart_of(entry: ProfileEntry) -> str:
    requested = entry.requirements.requested()
    values = ", ".join(f"{name}={value}" for name, value in requested)
    return f"{entry.shape} on {entry.device.name or entry.device.type}: {values}"


def _of_tables(tables: Iterable[dict[str, Any]], source: str) -> Iterator[Timed]:
    for table in tables:
        when = ", ".join(f"{name}={value}" for name, value in table.get("when", {}).items()) or "every request"
        for candidate, time in table["microseconds"].items():
            yield Timed(when, candidate, float(time), source)


def charts(times: Iterable[Timed]) -> dict[str, list[Timed]]:
    """Return the times of each chart, the fastest first, by what was measured."""
    found: dict[str, list[Timed]] = {}
    for each in times:
        found.setdefault(each.what, []).append(each)
    return {what: sorted(group, key=lambda one: (one.microseconds, one.candidate)) for what, group in found.items()}
