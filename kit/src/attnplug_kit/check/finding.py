"""What a check finds, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

if TYPE_CHECKING:
    from attnplug.errors import ManifestError


@frozen
class Finding:
    """
    One finding, in the three sentences of an error.

    Attributes:
        problem: What is there.
        expected: What is true, or what is allowed.
        fix: The fix.
        path: The file.
        line: The line, counted from 1; None where the finding is about the file.
        kind: A ``problem``, which keeps something from working, or a ``note``.
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

    @property
    def place(self) -> str:
        """The file, with the line where there is one."""
        return self.path if self.line is None else f"{self.path}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return attrs.asdict(self)


@frozen
class Report:
    """
    What a check has found.

    Attributes:
        files: The files that were looked at, most of them manifests.
        backends: The names of the backends.
        findings: The problems and the notes, by file and line.
    """

    files: tuple[str, ...]
    backends: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What keeps something from working."""
        return tuple(finding for finding in self.findings if finding.kind == "problem")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """What may be meant otherwise."""
        return tuple(finding for finding in self.findings if finding.kind == "note")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "files": list(self.files),
            "backends": list(self.backends),
            "problems": [finding.to_dict() for finding in self.problems],
            "notes": [finding.to_dict() for finding in self.notes],
        }
