"""
CPU seconds of tests, by file: a pytest plugin that records them, and a command that prints them.

``--cpu-report FILE`` appends a line for each test and process of tests; child processes count for the test that waited
for them. ``python -m tools.cpu_times FILE [BEFORE]`` prints a table, beside that of an earlier run.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tools import forked

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

OPTION: Final = "--cpu-report"
REST: Final = "imports, collection and reports"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cpu-report``."""
    parser.addoption(OPTION, metavar="FILE", type=Path, help="append the CPU seconds of each test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Record where the command line requests a file."""
    path = config.getoption(OPTION)
    if path is not None:
        config.pluginmanager.register(Recorder(path.absolute()), "cpu-times")


class Recorder:
    """Appends one line per test: CPU seconds, tab, node id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._in_tests = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure a test with its fixtures."""
        start = _cpu_seconds()
        try:
            return (yield)
        finally:
            seconds = _cpu_seconds() - start
            self._in_tests += seconds
            self._append(seconds, item.nodeid)

    def pytest_unconfigure(self) -> None:
        """Record what this process used outside of tests. One that ran none waited for those that did: not theirs."""
        self._append(_cpu_seconds() - self._in_tests if self._in_tests else sum(os.times()[:2]), REST)

    def _append(self, seconds: float, name: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:  # a short line is written in one piece
            file.write(f"{seconds:.4f}\t{name}\n")


def _cpu_seconds() -> float:
    return sum(os.times()[:4]) + forked.seconds()


def by_file(path: Path) -> dict[str, tuple[float, int]]:
    """Return CPU seconds and number of tests of each file in a report."""
    files: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for line in path.read_text("utf-8").splitlines():
        seconds, _, name = line.partition("\t")
        file = name.partition("::")[0]
        files[file] = files[file][0] + float(seconds), files[file][1] + 1
    return dict(files)


def table(now: dict[str, tuple[float, int]], before: dict[str, tuple[float, int]]) -> list[str]:
    """Return the rows of a Markdown table: the files that take longest in either run first, and a total."""
    rows = [(name, before.get(name, (0.0, 0)), now.get(name, (0.0, 0))) for name in now.keys() | before.keys()]
    rows.sort(key=lambda row: -max(row[1][0], row[2][0]))
    rows.insert(0, ("total", _sum(row[1] for row in rows), _sum(row[2] for row in rows)))
    head = ["| file | CPU s before | tests | CPU s now | tests |", "| --- | --- | --- | --- | --- |"]
    return head + [f"| {name} | {old[0]:.1f} | {old[1]} | {new[0]:.1f} | {new[1]} |" for name, old, new in rows]


def _sum(files: Iterable[tuple[float, int]]) -> tuple[float, int]:
    seconds, tests = zip(*files, strict=True)
    return sum(seconds), sum(tests)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    arguments = parser.parse_args()
    print("\n".join(table(by_file(arguments.report), by_file(arguments.before) if arguments.before else {})))


if __name__ == "__main__":
    main()
