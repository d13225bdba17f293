"""A run of the benchmarks, and the ways to write it down."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.errors import RequestError
from attnplug_kit.bench.measurement import Measurement, told, told_range

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DECIDING: Final = (
    "Budgets of attnplug's own part decide whether a run fails. What the backend takes besides, its `build` and its",
    "`forward` over the raw calls, is held against the same budgets and told, and fails no run.",
)
_ON_A_BACKEND: Final = {"build", "forward"}


@frozen
class Result:
    """
    What was measured, and on what.

    Attributes:
        command: The command that measured.
        machine: What the numbers depend on.
        measurements: The numbers.
        setup: What numbers of a backend depend on besides: its variant, device, dtype, threads.
        notes: What could not be measured, or not well, and why.
        failures: What went wrong while others were measured.
    """

    command: str
    machine: Mapping[str, Any]
    measurements: tuple[Measurement, ...]
    setup: Mapping[str, str] = field(factory=dict)
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Whether nothing failed, and every budget is kept that decides."""
        return not self.failures and all(one.within for one in self.measurements if one.decides)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        numbers = [measurement.to_dict() for measurement in self.measurements]
        return {
            "command": self.command,
            "machine": dict(self.machine),
            "setup": dict(self.setup),
            "measurements": numbers,
            "notes": list(self.notes),
            "failures": list(self.failures),
        }

    def facts(self) -> list[tuple[str, str]]:
        """Return what the numbers depend on, ready to read."""
        versions = ", ".join(f"{name} {version}" for name, version in self.machine["versions"].items())
        return [
            ("processor", f"{self.machine['processor']}, {self.machine['processors']} of them"),
            ("load before", str(self.machine["load"])),
            ("system", str(self.machine["system"])),
            ("Python", str(self.machine["python"])),
            ("versions", versions),
            ("installed distributions", str(self.machine["distributions"])),
            *self.setup.items(),
            ("command", f"`{self.command}`"),
        ]

    def remarks(self) -> list[str]:
        """Return what failed, and the notes, each on one line."""
        failed = [f"failed: {' '.join(failure.split())}" for failure in self.failures]
        return [*failed, *(f"note: {note}" for note in self.notes)]

    def page(self) -> str:
        """Return the result as Markdown."""
        return "\n".join(
            [
                self._title(),
                "",
                "Written by `attnplug bench`; not edited by hand. The median is held against the budget; half of the",
                "samples lie between the quartiles.",
                *self._who_decides(),
                "",
                "| what | value |",
                "| --- | --- |",
                *(f"| {name} | {value} |" for name, value in self.facts()),
                "",
                "| what | median | quartiles | best | budget | verdict |",
                "| --- | --- | --- | --- | --- | --- |",
                *map(_row, self.measurements),
                "",
                *(f"- {said.removeprefix('note: ')}" for said in self.remarks()),
                *([""] if self.remarks() else []),
            ]
        )

    def _who_decides(self) -> list[str]:
        told = any(measurement.budget is not None and not measurement.decides for measurement in self.measurements)
        return ["", *DECIDING] if told else []

    def _title(self) -> str:
        names = {measurement.name for measurement in self.measurements}
        if names <= _ON_A_BACKEND:
            return f"# Build and forward of {self.setup.get('backend', 'a backend').partition(',')[0]}"
        return "# Budgets" if names & _ON_A_BACKEND else "# Budgets of the selection"

    def write(self, file: Path) -> None:
        """
        Write the result, as Markdown or JSON by the file's suffix.

        Raises:
            RequestError: The suffix is another one, or the file cannot be written.
        """
        text = self.page() if check_suffix(file) == ".md" else json.dumps(self.to_dict(), indent=2) + "\n"
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"--output {str(file)!r} was given", f"it cannot be written: {error.strerror}", "name another file"
            ) from error


def check_suffix(file: Path) -> str:
    """
    Return the suffix of a file that a result can be written to.

    Raises:
        RequestError: It can be written neither as Markdown nor as JSON.
    """
    if file.suffix not in (".md", ".json"):
        raise RequestError(
            f"--output {str(file)!r} was given", "a result is written as .md or .json", "name such a file"
        )
    return file.suffix


def _row(m: Measurement) -> str:
    median, best = told(m.median, m.unit), "-" if m.best is None else told(m.best, m.unit)
    return f"| {m.what} | {median} | {told_range(*m.quartiles, m.unit)} | {best} | {_budget(m)} | {m.verdict or '-'} |"


def _budget(measurement: Measurement) -> str:
    return "-" if measurement.budget is None else f"{measurement.budget:g} {measurement.unit}"
