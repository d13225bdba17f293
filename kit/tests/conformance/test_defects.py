"""The kit on backends with one defect each: the test that names a defect fails; and their table has them all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kit.tests.conformance.defects import plugin
from kit.tests.conformance.defects.defect import Defect
from kit.tests.conformance.defects.uncaught import UNCAUGHT
from kit.tests.conformance.defects.worker import described
from tools import forked, wrong_backends

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
CAUGHT = sorted(set(Defect.all) - set(UNCAUGHT))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Run the named test of every defect, all in one process."""
    # Tracing would double the time, and what the kit runs is measured where it runs the built-in backend.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    words = ("-m", wrong_backends.WORKER, str(tmp_path_factory.mktemp("defects")), "--named", *CAUGHT)
    environment = {**outside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = forked.run(*words, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUGHT)
def test_a_defect_is_found(name: str, rows: dict[str, dict[str, object]]) -> None:
    defect = Defect.all[name]

    assert rows[name]["named"], f"{defect.test} with {defect.message!r} passed; failed: {rows[name]['failed']}"


def test_every_module_of_defects_is_in_the_plugin() -> None:
    modules = {path.stem for path in Path(plugin.__file__).parent.glob("*.py")} - {
        "defect",
        "plugin",
        "uncaught",
        "worker",
    }

    assert {each.__module__.rpartition(".")[2] for each in Defect.all.values()} == modules


def test_the_table_has_every_wrong_backend() -> None:
    data = json.loads(wrong_backends.DATA.read_text("utf-8"))
    found = {
        name: {key: one[key] for key in ("class", "defect", "test", "uncaught")}
        for name, one in data["backends"].items()
    }
    wanted = {
        name: {key: one[key] for key in ("class", "defect", "test", "uncaught")} for name, one in described().items()
    }

    assert found == wanted, "run `python -m tools.wrong_backends`, and commit what it wrote"
    assert wrong_backends.PAGE.read_text("utf-8") == wrong_backends.page(data)
    assert {name for name, one in data["backends"].items() if not one.get("after", {"named": True})["named"]} == set(
        UNCAUGHT
    )
