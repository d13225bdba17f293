"""Findings as a person reads them: each with its place, problems before notes, and the count last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.commands import STYLES, console, is_terminal, say, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_kit.check.finding import Finding, Report

_INDENT: Final = "    "


def show(report: Report) -> None:
    """Write a report."""
    for finding in (*report.problems, *report.notes):
        say("\n".join(_lines(finding)))
        say()
    text = ", ".join(_counted(report))
    if is_terminal():
        console().print(text, style=STYLES["broken" if report.problems else "ready"])
    else:
        say(text)


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.place}: {'note: ' if finding.kind == 'note' else ''}{finding.problem}"
    yield from wrapped(f"expected: {finding.expected}", _INDENT)
    yield from wrapped(f"fix: {finding.fix}", _INDENT)


def _counted(report: Report) -> Iterator[str]:
    problems, notes, files = len(report.problems), len(report.notes), len(report.files)
    yield f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem"
    if notes:
        yield f"{notes} note{'s' * (notes != 1)}"
    yield f"{files} file{'s' * (files != 1)} checked"
