"""`constraints.lock` has what `constraints.txt` pins, with hashes; its own checks find each difference."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement

from tools import lock

PINNED = """\
# a comment
attrs==26.1.0
numpy==2.4.6; python_version >= "3.11"
numpy==2.2.6; python_version < "3.11"
torch==2.13.0
"""
LOCKED = f"""\
attrs==26.1.0 \\
    --hash=sha256:{"a" * 64} \\
    --hash=sha256:{"b" * 64}
numpy==2.4.6; python_version >= "3.11" \\
    --hash=sha256:{"c" * 64}
numpy==2.2.6; python_version < "3.11" \\
    --hash=sha256:{"d" * 64}
"""


def test_the_lock_has_what_is_pinned() -> None:
    assert lock.problems(lock.PINS.read_text("utf-8"), lock.LOCK.read_text("utf-8")) == []


def test_the_lock_names_no_place_that_files_come_from() -> None:
    lines = [line for line in lock.LOCK.read_text("utf-8").splitlines() if not line.startswith("#")]

    assert not [line for line in lines if "://" in line or "@" in line or line.lstrip().startswith(("-i", "--index"))]
    assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines if line.startswith(" "))


def test_run_time_dependencies_of_core_are_locked() -> None:
    names = {Requirement(key.partition(";")[0]).name for key in lock.locked(lock.LOCK.read_text("utf-8"))}

    assert {"attrs", "packaging", "platformdirs", "pluggy", "rich", "tomli"} <= names


def test_equal_files_have_no_problem() -> None:
    assert lock.problems(PINNED, LOCKED) == []
    assert lock.locked(LOCKED)["attrs"] == ("26.1.0", (f"--hash=sha256:{'a' * 64}", f"--hash=sha256:{'b' * 64}"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("attrs==26.1.0", "attrs==26.2.0", "attrs is pinned to 26.1.0 and locked to 26.2.0"),
        ("attrs==26.1.0", "attr==26.1.0", "attrs is pinned and not locked"),
        ("attrs==26.1.0", "attr==26.1.0", "attr is locked and not pinned"),
        (f" \\\n    --hash=sha256:{'d' * 64}", "", 'numpy; python_version < "3.11" has no hash'),
        ("d" * 64, "d" * 63, 'numpy; python_version < "3.11" has no hash'),
    ],
)
def test_a_difference_is_found(old: str, new: str, problem: str) -> None:
    assert old in LOCKED

    try:
        found = lock.problems(PINNED, LOCKED.replace(old, new))
    except ValueError as error:  # what is left of a malformed hash is no requirement
        found = [str(error)]
        problem = "--hash"

    assert any(problem in each for each in found), found
