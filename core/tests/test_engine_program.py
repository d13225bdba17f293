"""`run_program`: a host's module in another process, and what goes wrong there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from attnplug.engines import run_program
from attnplug.errors import PluginError

if TYPE_CHECKING:
    from pathlib import Path

ECHO = "import json, os, sys\nprint(json.dumps({'got': json.load(sys.stdin), 'set': os.environ.get('ACME_HOST')}))\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what writes the module ``attnplug_acme.program``, and runs it."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "attnplug_acme").mkdir()
    (tmp_path / "attnplug_acme" / "__init__.py").touch()

    def run(source: str, **more: object):
        (tmp_path / "attnplug_acme" / "program.py").write_text(source, "utf-8")
        return run_program("attnplug_acme.program", {"a": [1]}, engine="Acme", trial="import acme", **more)

    return run


def test_a_module_reads_a_request_and_answers(program) -> None:
    assert program(ECHO) == {"got": {"a": [1]}, "set": None}
    assert program(ECHO, environment={"ACME_HOST": "2"})["set"] == "2"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("print('noise'); raise OSError('no library')", "OSError: no library"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("print('no json')", "its answer is no JSON"),
        ("import time; time.sleep(60)", "it takes more than 0.5 s"),
    ],
)
def test_a_module_that_fails_is_an_error_with_its_reason(source: str, why: str, program) -> None:
    with pytest.raises(PluginError, match=f"Acme fails where it is started to see what it selects: {why}") as caught:
        program(source, timeout=0.5 if "sleep" in source else 60)

    assert caught.value.fix == (
        "see whether `python -c 'import acme'` works; if it does, report this to the authors of attnplug-acme"
    )
