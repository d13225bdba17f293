"""`make drift` without an index: what it reads, the verdicts, the table and the exit status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tools import compatibility, drift

if TYPE_CHECKING:
    from pathlib import Path

LISTING = """\
torch (2.15.0)
Available versions: 2.15.0, 2.15.0rc1, 2.14.1, 2.13.0+cpu, 2.13.0, 2.9.1
  INSTALLED: 2.13.0+cpu
"""
BETAS = "flash-attn-4 (4.0.0b36)\nAvailable versions: 4.0.0b36, 4.0.0b9\n"
PROJECT = '[project]\nname = "attnplug-engine"\ndependencies = ["engine>=1,<3"]\n'
MANIFEST = 'api = "1.0"\nbackend = { name = "acme" }\n[variants.fast]\nrequires = ["kernels >=2"]\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace that requires an engine and a kernel library."""
    source = tmp_path / "hosts" / "engine" / "src" / "engine"
    source.mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "hosts" / "engine" / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (source / "attnplug.toml").write_text(MANIFEST, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("listing", "releases", "found"),
    [
        (LISTING, "", "2.15.0"),
        (LISTING, "==2.13.*", "2.13.0+cpu"),
        (LISTING, "<2.10", "2.9.1"),
        (BETAS, "", "4.0.0b36"),
    ],
)
def test_the_newest_release_of_a_listing(listing: str, releases: str, found: str) -> None:
    assert drift.newest(listing, releases) == found


@pytest.mark.parametrize("listing", [LISTING, "ERROR: No matching distribution found"])
def test_a_release_that_the_index_lacks(listing: str) -> None:
    with pytest.raises(LookupError, match=r"no release ==9\.\*"):
        drift.newest(listing, "==9.*")


@pytest.mark.parametrize(
    ("output", "status", "verdict"),
    [
        ("3 passed, 1 skipped in 2.1s", 0, "passed (3 tests)"),
        ("FAILED a.py::test_a[x y] - x\nERROR a.py::test_b\n1 failed", 1, "failed: a.py::test_a[x y] (and 1 more)"),
        ("ERROR a.py - ImportError\n1 error in 0.1s", 2, "failed: a.py"),
        ("5 deselected in 0.1s", 5, "failed: status 5, 5 deselected in 0.1s"),
        ("", 0, "failed: status 0, no output"),
    ],
)
def test_verdicts_of_pytest(output: str, status: int, verdict: str) -> None:
    assert drift.verdict_of(output, status) == verdict


@pytest.mark.parametrize(
    ("distribution", "release", "verdict", "fault"),
    [
        ("engine", "2.5", "failed: a.py", "engine 2.5 failed: a.py, and `engine >=1,<3` admits it"),
        ("engine==2.*", "2.5rc1", "failed: a.py", "engine 2.5rc1 failed: a.py, and `engine >=1,<3` admits it"),
        ("kernels", "2.0", "failed: a.py", "kernels 2.0 failed: a.py, and `kernels >=2` admits it"),
        ("engine", "3.0", "failed: a.py", None),
        ("engine", "2.5", "passed (3 tests)", None),
        ("other", "1.0", "failed: a.py", None),
    ],
)
def test_a_range_that_admits_what_failed_is_a_fault(
    root: Path, distribution: str, release: str, verdict: str, fault: str | None
) -> None:
    row = drift.Row(distribution, release, release, verdict, "2026-01-31")
    assert list(drift.faults([row], drift.ranges(root))) == ([fault] if fault else [])


def test_rows_are_kept_and_the_exit_status_says_what_failed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drift, "TARGETS", (drift.Target("engine"), drift.Target("kernels")))
    verdicts = {"engine": "failed: a.py", "kernels": "passed (3 tests)"}

    def examine(target: drift.Target, _: Path) -> drift.Row:
        return drift.Row(target.name, "2.5", "2.5", verdicts[target.name], "2026-01-31")

    monkeypatch.setattr(drift, "examine", examine)
    assert drift.main(["kernels"], root) == 0
    assert [(row.distribution, row.verdict) for row in drift.recorded(root)] == [
        ("engine", "not run"),
        ("kernels", "passed (3 tests)"),
    ]

    assert drift.main([], root) == 1
    assert "and `engine >=1,<3` admits it" in capsys.readouterr().out
    page = compatibility.page(root)
    assert "| distribution | newest | tested | verdict | date |" in page
    assert "| `engine` | 2.5 | 2.5 | failed: a.py | 2026-01-31 |" in page

    assert drift.main(["nothing"], root) == 2
    assert "no such target: nothing; there are engine, kernels" in capsys.readouterr().out


def test_what_cannot_be_tested_is_not_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_run", lambda *_, **__: ("Available versions: 2.5", 0))
    row = drift.examine(drift.Target("engine", engine="engine"), root)
    assert (row.newest, row.tested) == ("2.5", "")
    assert row.verdict == "not run: no environment of `make test-hosts` has engine 2.5"

    monkeypatch.setattr(drift, "_run", lambda *_, **__: ("ERROR: no such package", 1))
    assert drift.examine(drift.Target("engine"), root).verdict == "not run: the index has no release at all"


def test_the_kept_rows_are_of_the_targets() -> None:
    kept = json.loads((drift.ROOT / compatibility.DRIFT).read_text(encoding="utf-8"))
    assert [row["distribution"] for row in kept] == [target.name for target in drift.TARGETS]
