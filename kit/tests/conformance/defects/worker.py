"""
Runs the kit on wrong backends in this process, and prints a line of JSON for each: ``worker FOLDER [--named] NAME...``.

Importing torch takes seconds, and there are more than a hundred of them: so one process runs many. ``NAME`` runs the
named test and the basic tier; ``+NAME`` the whole kit, and ``a+b`` too, with the defects in one backend first.
``--named`` runs the named tests alone. Without arguments it describes them all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import attnplug
from attnplug_kit import test_conformance
from kit.tests.conformance.defects import plugin
from kit.tests.conformance.defects.defect import Defect, Group
from kit.tests.conformance.defects.uncaught import UNCAUGHT
from kit.tests.conformance.test_mutants import BUILT_IN, HERE, LEAST, MUTANTS, MUTANTS_OF_LEAST, matches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NAMED = {name: (each.test, each.message) for name, each in Defect.all.items()} | MUTANTS | MUTANTS_OF_LEAST

# The other two read manifests and imports: no defect changes those.
_CLASSES = [
    name for name in vars(test_conformance) if name.startswith("Test") and name not in {"TestRefusals", "TestPurity"}
]
_ALL, _BASIC = "Test*", "TestBasic::*"


class Failures:
    """
    Runs the tests of some patterns, each pattern up to its first failure, and collects the messages of what fails.

    Args:
        patterns: Of names with their class, as of `matches`.
        stops: Whether a pattern's tests end at its first failure with the message that belongs to it.
        message: What a failure of the first pattern says.
    """

    def __init__(self, patterns: Sequence[str], *, stops: bool, message: str = "") -> None:
        self._patterns, self._stops, self._message = patterns, stops, message
        self.found: dict[str, dict[str, str]] = {pattern: {} for pattern in patterns}
        self._done: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._of(item.nodeid)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._done.issuperset(self._of(item.nodeid)):
            pytest.skip("enough is known")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(crash.message if crash is not None else report.longrepr)
        for pattern in self._of(report.nodeid):
            self.found[pattern][report.nodeid.partition("::")[2]] = message
            if self._stops and (pattern != self._patterns[0] or matches(f"*{self._message}*", message)):
                self._done.add(pattern)

    def _of(self, nodeid: str) -> list[str]:
        name = nodeid.partition("::")[2]
        return [pattern for pattern in self._patterns if matches(pattern, name)]


def register(name: str, folder: Path) -> None:
    """Offer a wrong backend to this process."""
    manifest = folder / f"{name}.toml"
    least = name in MUTANTS_OF_LEAST or getattr(Defect.all.get(name), "least", False)
    manifest.write_text((LEAST if least else BUILT_IN).replace("{}", name, 1), "utf-8")
    attnplug.register(plugin.__name__, manifest=manifest)


def run_kit(name: str, folder: Path, *patterns: str, stops: bool = True, message: str = "") -> list[dict[str, str]]:
    """Return the tests that fail with their messages, of each pattern. Only classes with such tests are collected."""
    failures = Failures(patterns, stops=stops, message=message)
    classes = [each for each in _CLASSES if any(matches(part.partition("::")[0], each) for part in patterns)]
    if not classes:  # another kit has no such test
        return [{} for _ in patterns]
    plain = ["-p", "no:randomly", "-p", "no:cacheprovider", "-q", "--rootdir", str(folder)]
    parts = [f"attnplug_kit.test_conformance::{each}" for each in classes]
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        command = ["--pyargs", *parts, *plain, f"--attn-backend={name}", "--attn-device=cpu"]
        status = pytest.main(command, plugins=[failures])
    # A part of the kit may have no such test, and leaves declared values out: what failed is in the reports.
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}:
        raise RuntimeError(f"the kit ended with {status!r} on {name}")
    return [failures.found[pattern] for pattern in patterns]


def pattern_of(name: str) -> str:
    """Return the pattern of a named test with its class."""
    test = NAMED[name][0]
    function = test.partition("[")[0]
    classes = [each for each in _CLASSES if hasattr(getattr(test_conformance, each), function)]
    return f"{classes[0] if classes else 'no class'}::{test}"


def named_failures(name: str, found: Mapping[str, str]) -> list[str]:
    """Return the failures of the named test that have its message."""
    pattern, message = pattern_of(name), NAMED[name][1]
    return [one for one, text in found.items() if matches(pattern, one) and matches(f"*{message}*", text)]


def judge(name: str, folder: Path) -> dict[str, Any]:
    """Return what the named test and the basic tier catch; each stops at its first failure."""
    started = time.process_time()
    failed, basic = run_kit(name, folder, pattern_of(name), _BASIC, message=NAMED[name][1])
    return _row(
        name, started, whole=False, basic=list(basic), named=named_failures(name, failed), kit=[*failed, *basic]
    )


def judge_group(names: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the whole kit catches of defects that are in one backend first: alone, each runs what that fails."""
    started, group = time.process_time(), names[0]
    if len(names) > 1:
        group = f"group_{names[0]}"
        Defect.all[group] = partial(Group, [Defect.all[name]() for name in names])
        register(group, folder)
    (failed,) = run_kit(group, folder, _ALL, stops=len(names) == 1)
    tests = sorted({f"{one.partition('[')[0]}*" for one in failed})
    for name in names:
        found = failed
        if len(names) > 1:
            found = {one: text for part in run_kit(name, folder, *tests) for one, text in part.items()} if tests else {}
        basic = [one for one in found if matches(_BASIC, one)]
        yield _row(name, started, whole=True, basic=basic, named=named_failures(name, found), kit=list(found))
        started = time.process_time()


def _row(name: str, started: float, *, whole: bool, **found: list[str]) -> dict[str, Any]:
    tests = {what: next(iter(each), "").replace(f"[{name}/", "[") for what, each in found.items()}
    return {"name": name, **tests, "whole": whole, "seconds": round(time.process_time() - started, 1)}


def described() -> dict[str, dict[str, Any]]:
    """Return class, defect and named test of each wrong backend."""
    return {
        name: {
            "class": "mutants" if name not in Defect.all else Defect.all[name].__module__.rpartition(".")[2],
            "defect": _words(name),
            "test": test,
            "uncaught": UNCAUGHT.get(name, ""),
            "alone": name not in Defect.all or Defect.all[name].alone or Defect.all[name].least,
        }
        for name, (test, _) in NAMED.items()
    }


def _words(name: str) -> str:
    """Return the defect in words: the docstring of its class, or of its module."""
    if name in Defect.all:
        return str(Defect.all[name].__doc__)
    text = next(path for path in HERE.glob(f"*/{name}.py")).read_text("utf-8")
    return text.split('"""')[1].strip().partition("\n")[0]


def main(folder: Path, names: list[str]) -> None:
    """Judge backends, and print a line for each as soon as it is known."""
    torch.set_num_threads(1)
    os.chdir(folder)
    for job in names:
        each = job.strip("+").split("+")
        for name in each:
            if name != "--named":
                register(name, folder)
        for row in _rows(each, folder, whole="+" in job, alone="--named" in names):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


def _rows(names: list[str], folder: Path, *, whole: bool, alone: bool) -> Iterator[dict[str, Any]]:
    if names == ["--named"]:
        return
    if alone:
        for name in names:
            (failed,) = run_kit(name, folder, pattern_of(name), message=NAMED[name][1])
            yield {"name": name, "named": named_failures(name, failed), "failed": failed}
    elif whole:
        yield from judge_group(names, folder)
    else:
        yield judge(names[0], folder)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]), sys.argv[2:])
    else:
        sys.stdout.write(json.dumps(described()))
