"""The findings of a check, and how they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import frozen

from attnplug.commands import STYLES, console, escaped, is_terminal, say, wrapped
from attnplug.negotiation import EVALUATIONS
from attnplug_kit.unexercised import lines_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.errors import ManifestError
    from attnplug_kit.unexercised import Unexercised

_INDENT: Final = "    "


@frozen
class Finding:
    """
    One finding, in the three parts of an error.

    Attributes:
        problem: The problem.
        expected: What is valid instead.
        fix: The fix.
        path: The file.
        line: The line, counted from 1; None where the finding is about the file.
        kind: A ``problem``, which keeps something from working, or a ``note``, which may be intended.
    """

    problem: str
    expected: str
    fix: str
    path: str
    line: int | None = None
    kind: Literal["problem", "note"] = "problem"

    @classmethod
    def of(cls, error: ManifestError) -> Finding:
        """Return an error of the manifest as a finding."""
        return cls(error.problem, error.expected, error.fix, error.path, error.line)

    def note(self) -> Finding:
        """Return it as a note."""
        return attrs.evolve(self, kind="note")

    def lines(self) -> Iterator[str]:
        """Yield it as lines of text, with its place."""
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        yield escaped(f"{place}: {'note: ' if self.kind == 'note' else ''}{self.problem}")
        if self.expected:
            yield from wrapped(f"expected: {self.expected}", _INDENT)
        yield from wrapped(f"fix: {self.fix}", _INDENT)


@frozen
class Report:
    """
    The result of a check.

    Attributes:
        files: The files that were checked.
        backends: The names of the backends.
        findings: The problems and the notes, by file and line.
        unexercised: The declared values that no evidence beside a manifest covers.
        evaluations: By variant, the evaluations of rules that a choice of block size, layout and form takes at most.
    """

    files: tuple[str, ...]
    backends: tuple[str, ...]
    findings: tuple[Finding, ...]
    unexercised: tuple[Unexercised, ...] = ()
    evaluations: Mapping[str, int] = attrs.field(factory=dict, hash=False)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that keep something from working."""
        return tuple(finding for finding in self.findings if finding.kind == "problem")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that may be intended."""
        return tuple(finding for finding in self.findings if finding.kind == "note")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "files": list(self.files),
            "backends": list(self.backends),
            "problems": [attrs.asdict(finding) for finding in self.problems],
            "notes": [attrs.asdict(finding) for finding in self.notes],
            "unexercised": [item.to_dict() for item in self.unexercised],
            "evaluations": dict(self.evaluations),
        }

    def summary(self) -> str:
        """Return the numbers of findings, files and evaluations of rules in one line."""
        problems, notes, files = len(self.problems), len(self.notes), len(self.files)
        found = [f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem"]
        found += [f"{notes} note{'s' * (notes != 1)}"] if notes else []
        most = max(self.evaluations.values(), default=0)
        share = f"; rules take at most {most:,} evaluations (limit: {EVALUATIONS:,})" if most else ""
        return ", ".join([*found, f"{files} file{'s' * (files != 1)} checked"]) + share


def show(report: Report) -> None:
    """Write a report to the terminal: problems before notes, then what no run exercised, and the summary last."""
    for finding in (*report.problems, *report.notes):
        say("\n".join(finding.lines()))
        say()
    for variant in dict.fromkeys(item.variant for item in report.unexercised):
        say(escaped(f"{variant}, not exercised by the conformance kit:"))
        for line in lines_of(item for item in report.unexercised if item.variant == variant):
            say(escaped(f"{_INDENT}{line}"))  # not wrapped: commands are copied
    if any(item.command for item in report.unexercised):
        say("then move report/evidence-*.json to evidence/VARIANT-DEVICE.json beside the manifest")
        say()
    if is_terminal():
        console().print(report.summary(), style=STYLES["broken" if report.problems else "ready"])
    else:
        say(report.summary())
