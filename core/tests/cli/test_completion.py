"""Completion in a shell: commands, options, devices and backends; argcomplete is imported for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from attnplug.cli import BUILT_IN
from attnplug.cli.completion import line_parser

if TYPE_CHECKING:
    import argparse

    from tests.command import Site


def _command(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
    return commands.choices[name]


def test_every_command_completes(site: Site) -> None:
    (commands,) = (action for action in line_parser("attnplug ")._actions if isinstance(action.choices, dict))

    assert {*BUILT_IN, "help"} <= set(commands.choices)


def test_options_are_those_of_the_command_of_the_line(site: Site) -> None:
    parser = line_parser("attnplug explain --dev")

    options = {option for action in _command(parser, "explain")._actions for option in action.option_strings}
    assert {"--device", "--matrix", "--head-size"} <= options
    assert not [action for action in _command(parser, "list")._actions if action.dest == "json"]


def test_devices_and_backends_complete(site: Site) -> None:
    actions = {action.dest: action for action in _command(line_parser("attnplug explain "), "explain")._actions}

    assert {"current", "cpu", "h100", "mi300x", "sm90"} <= set(actions["device"].completer())
    assert {"flash", "flash/new", "torch/sdpa", "auto"} <= set(actions["backend"].completer())


def test_a_broken_command_completes_to_nothing(empty: Site) -> None:
    empty.metadata("acme", "1.0", "[attnplug.commands]\ngreet = scratch_nowhere\n")

    parser = line_parser("attnplug greet --")

    assert [action.dest for action in _command(parser, "greet")._actions] == ["help"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [("attnplug exp", "explain"), ("attnplug explain --mat", "--matrix"), ("attnplug explain --device h10", "h100")],
)
def test_a_shell_gets_the_words(site: Site, line: str, expected: str) -> None:
    pytest.importorskip("argcomplete", reason="argcomplete is not installed (attnplug[completion])")
    reading, writing = os.pipe()
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": f"/dev/fd/{writing}",
    }

    subprocess.run([sys.executable, "-m", "attnplug"], env=environment, pass_fds=[writing], check=False, timeout=60)

    os.close(writing)
    with os.fdopen(reading) as words:
        assert expected in [word.strip() for word in words.read().split("\n")]


def test_nothing_of_it_is_imported_otherwise(start, site: Site) -> None:
    done = start(
        "-c",
        "import sys; from attnplug.cli.main import main; main(['list', '--json']);"
        "sys.exit('argcomplete' in sys.modules or 'attnplug.cli.completion' in sys.modules)",
    )

    assert done.code == 0
