"""``attnplug doctor``: what is wrong with this environment, and the fix of each problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.cli.list import USABLE, device_objections
from attnplug.commands import NO, OK, STYLES, console, is_terminal, readable, say, say_json, wrapped

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from attnplug.cli.doctor.engines import EngineState
    from attnplug.cli.doctor.report import Report
    from attnplug.negotiation.candidate import Candidate
    from attnplug.request.device import Device

_EPILOG: Final = """\
What is odd and does no harm is a note; a setting that has no effect is a warning; what is broken is a problem.

exit codes: 0 nothing is broken, 1 something is, or what a setting requests cannot be used here
"""
_INDENT: Final = "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Report interpreter, device, settings that differ from the default, plugins that can run here or miss "
        "something,\nand what is broken with its fix. No plugin is imported unless --load is given."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--all", action="store_true", help="print also what is as it should be, in full")
    parser.add_argument("--json", action="store_true", help="print JSON, always complete")
    parser.add_argument(
        "--load",
        action="store_true",
        help="also import the plugins of all ready candidates and load each for a simple request; start each engine",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine this environment."""
    from attnplug.cli.doctor.report import examine  # noqa: PLC0415 - help costs nothing this way

    report = examine(load=arguments.load)
    if arguments.json:
        say_json(report.to_dict())
    else:
        _show(report, whole=arguments.all, load=arguments.load)
    return NO if report.problems else OK


def _show(report: Report, *, whole: bool, load: bool) -> None:
    engines = [engine for engine in report.engines if whole or load or not engine.is_sound]
    for title, lines in _sections(report, engines, whole=whole):
        if lines:
            _say_title(title)
            say("\n".join(line for text in lines for line in wrapped(text, _INDENT)))
            say()
    _say_conclusion(len(report.problems), sum(note.stage == "evidence" for note in report.notes))


def _sections(report: Report, engines: Collection[EngineState], *, whole: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each section's title and its sentences, the problems last, where a reader looks first in a terminal."""
    rows = [row for row in report.setting_rows() if whole or not _is_default(row)]
    yield "environment", _environment(report.environment, whole=whole)
    yield "device", [str(report.device.device), report.device.how]
    yield "settings", [f"{name} = {_value(name, value)}  ({source})" for name, value, source in rows]
    yield "candidates", [*_candidates(report.candidates, report.device.device, whole=whole)]
    yield "loading", [f"{result.id}  {readable(result.status)}  {result.text}" for result in report.loading]
    yield "engines", [line for engine in engines for line in engine.lines()]
    yield "as expected (details: attnplug doctor --all)", [] if whole else [*_left_out(report, engines)]
    yield "notes", [str(note) for note in report.notes]
    yield "warnings", list(report.warnings)
    yield "problems", [text for p in report.problems for text in (f"{p.subject}: {p.what}", f"  fix: {p.fix}")]


def _is_default(row: tuple[str, Any, str]) -> bool:
    return row[2] == "default"


def _left_out(report: Report, engines: Collection[EngineState]) -> Iterator[str]:
    """Yield what the other sections leave out, a line each."""
    if any(map(_is_default, report.setting_rows())):
        yield f"{'all' if all(map(_is_default, report.setting_rows())) else 'the other'} settings have their defaults"
    elsewhere = sum(_is_for_another_device(each, report.device.device) for each in report.candidates)
    if elsewhere:
        yield f"{elsewhere} candidate{'s are' if elsewhere != 1 else ' is'} for other devices"
    absent = [candidate.id for candidate in report.candidates if candidate.availability == "absent"]
    if absent:
        yield f"not installed: {', '.join(absent)}"
    sound = [engine.name for engine in report.engines if engine not in engines]
    if sound:
        yield f"no problem with {', '.join(sound)}"


def _environment(facts: Mapping[str, Any], *, whole: bool) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    if not whole:
        return [f"{versions}, Python {facts['python']}"]
    return [versions, f"Python {facts['python']} ({facts['executable']})", facts["platform"]]


def _candidates(candidates: Iterable[Candidate], device: Device, *, whole: bool) -> Iterator[str]:
    elsewhere = []
    for candidate in candidates:
        if _is_for_another_device(candidate, device):
            elsewhere.append(candidate.id)
        elif whole or candidate.availability != "absent":
            yield _status(candidate)
    if elsewhere and whole:
        yield f"for other devices (details: attnplug list --all): {', '.join(elsewhere)}"


def _is_for_another_device(candidate: Candidate, device: Device) -> bool:
    return candidate.availability in USABLE and bool(device_objections(candidate, device))


def _status(candidate: Candidate) -> str:
    origin = f"  ({candidate.distribution})" if candidate.distribution else ""
    # Broken ones are among the problems, and of an absent one its name says enough.
    with_reasons = candidate.availability in ("missing_dependency", "refused")
    reasons = f": {'; '.join(map(str, candidate.reasons))}" if with_reasons else ""
    return f"{candidate.id}  {readable(candidate.availability)}{origin}{reasons}"


def _value(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or ("automatic" if name == "backend" else "none")
    return {"allow": "all", "kv_layout": "each backend's own"}.get(name, "none") if value is None else str(value)


def _say_title(title: str) -> None:
    if is_terminal():
        console().print(title, style=STYLES["broken"] if title == "problems" else "bold")
    else:
        say(title)


def _say_conclusion(problems: int, useless: int) -> None:
    """Say how many problems there are; without any, how many notes are about evidence that verifies nothing."""
    text = f"{problems} problem{'s' * (problems != 1)}" if problems else "nothing is broken"
    if useless and not problems:
        text = f"no backend is broken; {useless} note{'s' * (useless != 1)} about evidence that verifies nothing"
    if is_terminal():
        console().print(text, style=STYLES["broken" if problems else "ready"])
    else:
        say(text)
