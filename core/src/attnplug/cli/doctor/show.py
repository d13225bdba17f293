"""A report as a person reads it: sections, and the problems last, where the eye ends up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.commands import STYLES, console, is_terminal, readable, say, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.cli.doctor.report import Report
    from attnplug.negotiation.candidate import Candidate

_INDENT: Final = "    "


def show(report: Report) -> None:
    """Write a report."""
    for title, lines in sections(report):
        if lines:
            _say_title(title)
            say("\n".join(line for text in lines for line in wrapped(text, _INDENT)))
            say()
    _say_verdict(len(report.problems))


def sections(report: Report) -> Iterator[tuple[str, list[str]]]:
    """Yield each section's title and its sentences; a section without sentences has nothing to say."""
    yield "environment", _environment(report.environment)
    yield "device", [str(report.sight.device), report.sight.how]
    yield "settings", [f"{name} = {_value(name, value)}  ({source})" for name, value, source in report.setting_rows()]
    yield "candidates", [_standing(candidate) for candidate in report.candidates]
    yield "loading", [f"{trial.id}  {readable(trial.status)}  {trial.text}" for trial in report.trials]
    yield "notes", [str(note) for note in report.notes]
    yield "warnings", list(report.warnings)
    yield "problems", [text for p in report.problems for text in (f"{p.subject}: {p.what}", f"  fix: {p.fix}")]


def _environment(facts: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [versions, f"Python {facts['python']} ({facts['executable']})", facts["platform"]]


def _standing(candidate: Candidate) -> str:
    origin = f"  ({candidate.distribution})" if candidate.distribution else ""
    # What is broken is told among the problems, and an absent plugin by its name.
    told = candidate.availability in ("missing_dependency", "refused")
    why = f": {'; '.join(map(str, candidate.reasons))}" if told else ""
    return f"{candidate.id}  {readable(candidate.availability)}{origin}{why}"


def _value(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or ("automatic" if name == "backend" else "none")
    return {"allow": "all", "kv_layout": "each backend's own"}.get(name, "none") if value is None else str(value)


def _say_title(title: str) -> None:
    if is_terminal():
        console().print(title, style=STYLES["broken"] if title == "problems" else "bold")
    else:
        say(title)


def _say_verdict(problems: int) -> None:
    text = f"{problems} problem{'s' * (problems != 1)}" if problems else "nothing is broken"
    if is_terminal():
        console().print(text, style=STYLES["broken" if problems else "ready"])
    else:
        say(text)
