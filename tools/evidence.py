"""
A pytest plugin that writes what a run on a GPU showed: device, versions, command, outcome and numbers, as one page.

A test contributes a number by pytest's own ``record_property("decode, 64 x 4096", "286 us")``. Text of several lines, a
table for instance, is printed below the table of tests.
A number without hardware, versions and command is not evidence, so these pages are the only ones with numbers. The
revision is git's; the environment variable REVISION names it where the tree is copied without its history.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

PACKAGES = (
    "attnplug",
    "torch",
    "triton",
    "transformers",
    "flash-attn",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpu-report``."""
    parser.addoption("--gpu-report", metavar="FILE", type=Path, help="write device, versions, outcomes and numbers")


def pytest_configure(config: pytest.Config) -> None:
    """Collect reports where the command line requests a page."""
    path = config.getoption("--gpu-report")
    if path is not None:
        config.pluginmanager.register(Collector(path, " ".join(_command(config.invocation_params.args))))


class Collector:
    """Gathers the reports of one run and writes the page when it ends."""

    def __init__(self, path: Path, command: str) -> None:
        self.path = path
        self.command = command
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the call of each test, and a setup that did not reach its call."""
        if report.when == "call" or not report.passed:
            self.reports.append(report)

    def pytest_sessionfinish(self) -> None:
        """Write the page; a run without a single test leaves the last one alone."""
        if self.reports:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(page(self.command, machine(), self.reports), encoding="utf-8")


def page(command: str, facts: dict[str, str], reports: list[pytest.TestReport]) -> str:
    """Return the report as Markdown."""
    reports = sorted(reports, key=lambda r: r.nodeid)
    rows = [f"| `{r.nodeid}` | {r.outcome} | {_numbers(r)} |" for r in reports]
    return "\n".join(
        [
            f"# GPU tests on {facts['device']}",
            "",
            f"Written by `{command}`; not edited by hand.",
            "",
            "| what | value |",
            "| --- | --- |",
            *(f"| {key} | {value} |" for key, value in facts.items()),
            "",
            "| test | outcome | numbers |",
            "| --- | --- | --- |",
            *rows,
            "",
            *(line for r in reports for line in _below(r)),
        ]
    )


def machine() -> dict[str, str]:
    """Return what the numbers depend on: device, driver, interpreter, versions, revision."""
    return {
        "device": _device(),
        "Python": platform.python_version(),
        **dict(_versions()),
        "revision": revision(),
    }


def revision() -> str:
    """Return git's revision, or what the environment variable REVISION names where there is no history."""
    return os.environ.get("REVISION") or _output("git", "describe", "--always", "--dirty") or "unknown"


def _command(arguments: Sequence[str]) -> list[str]:
    """Return the command without the place of its report, which is one machine's own."""
    return ["pytest", *(argument for argument in arguments if not argument.startswith("--gpu-report"))]


def _device() -> str:
    query = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader")
    return _output(*query).splitlines()[0] if _output(*query) else "no NVIDIA GPU"


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603 - fixed command lines
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"evidence: {command[0]} failed ({error})", file=sys.stderr)
        return ""


def _numbers(report: pytest.TestReport) -> str:
    found = ((name, str(value)) for name, value in report.user_properties)
    return ", ".join(f"{name}: {'below' if _has_lines(value) else value}" for name, value in found) or "-"


def _below(report: pytest.TestReport) -> Iterator[str]:
    """Yield what fits no cell of a table."""
    for name, value in report.user_properties:
        if _has_lines(str(value)):
            yield from (f"`{report.nodeid}`, {name}:", "", str(value).strip("\n"), "")


def _has_lines(value: str) -> bool:
    return "\n" in value
