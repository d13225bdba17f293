"""
Collects what the tests of a run recorded, and reports it at the end: files, a table for each subject, the exit status.

`attnplug_kit.pytest_plugin` registers it. With pytest-xdist (``-n 4``) each process adds the subject to the reports of
its tests, and the first process merges them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from attnplug.request import Device
from attnplug_kit.conformance.report import RAN, SUBJECT, SubjectReport, lines_of, report_of, subject_of
from attnplug_kit.conformance.subject import Subject, find_subjects
from attnplug_kit.conformance.whole import tests_of_kit
from attnplug_kit.oracle.exercised import Exercised, observing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from attnplug_kit.conformance.tier import LeftOut


class Reporter:
    """
    Collects the reports of one run.

    Args:
        folder: The folder of the JSON files; None for no files.
        command: The command of the run, for the files.
        complete: Whether a declared value that no test exercised fails the run, if the run has the whole kit.
        left_out: The variants of the backend that the run does not test.
    """

    def __init__(self, folder: Path | None, command: str, *, complete: bool, left_out: Sequence[LeftOut] = ()) -> None:
        self._folder = folder
        self._command = command
        self._complete = complete
        self._left_out = left_out
        self._subjects: dict[str, Subject] = {}
        self._reports: dict[str, pytest.TestReport] = {}
        self._found: list[SubjectReport] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Add the subject of a test to its report, whether it runs or not."""
        call = getattr(item, "callspec", None)
        subject = call.params.get("subject") if call is not None else None
        if isinstance(subject, Subject):
            data = {"id": subject.id, "device": subject.device.to_dict(), "features": subject.features}
            name = json.dumps(data, sort_keys=True)
            self._subjects[name] = subject
            item.user_properties.append((SUBJECT, name))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Add to the report of a test what its comparisons with the oracle exercised."""
        ran = Exercised()
        with observing(ran.add):
            yield
        if ran.ranges:
            item.user_properties.append((RAN, json.dumps(ran.to_dict(), sort_keys=True)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a test's call, or of the phase that failed or skipped it."""
        if report.when == "call" or not report.passed:
            self._reports[report.nodeid] = report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Merge the reports, write them, and fail a whole run that exercised less than all."""
        if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist: the first one merges
            return
        by_subject: dict[str, list[pytest.TestReport]] = {}
        for report in self._reports.values():
            name = subject_of(report)
            if name is not None:
                by_subject.setdefault(name, []).append(report)
        for name, found in sorted(by_subject.items()):
            subject = self._subject(name)
            self._found.append(report_of(subject, found, tests_of_kit(subject)))
        if self._folder is not None and self._found:
            _write(self._folder, self._command, self._found)
        incomplete = any(report.missing and report.is_whole for report in self._found)
        if self._complete and incomplete and session.exitstatus == 0:
            session.exitstatus = 1

    def _subject(self, name: str) -> Subject:
        """Return the subject of a report, which another process may have collected."""
        if name not in self._subjects:
            data = json.loads(name)
            (self._subjects[name],) = find_subjects(data["id"], Device.from_dict(data["device"]), data["features"])
        return self._subjects[name]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print a table for each subject, and the variants that were left out."""
        for report in self._found:
            terminalreporter.section(f"attnplug: {report.subject.id}")
            for line in lines_of(report):
                terminalreporter.write_line(line)
        for left in self._left_out:
            terminalreporter.section(f"attnplug: {left.subject}")
            terminalreporter.write_line(str(left))


def _write(folder: Path, command: str, reports: list[SubjectReport]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / "report.json", [{"command": command, **report.to_dict()} for report in reports])
    for report in (each for each in reports if not each.subject.is_pair):  # evidence is of one variant
        name = "-".join(("evidence", report.subject.id.replace("/", "-"), *report.subject.features))
        _dump(folder / f"{name}.json", {"command": command, **report.evidence()})


def _dump(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")
