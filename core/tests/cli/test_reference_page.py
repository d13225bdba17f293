"""The page about the command line names what the command line has, and nothing else."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from attnplug import commands as exits
from attnplug.cli.command import BUILT_IN
from attnplug.cli.parser import Parser
from attnplug.request.fields import FIELDS
from attnplug_kit import bench

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "command-line.md").read_text("utf-8")


def _section(verb: str) -> str:
    return PAGE.partition(f"\n## {verb}\n")[2].partition("\n## ")[0]


def _tabled(text: str) -> set[str]:
    """Return the options in the first column of the tables."""
    cells = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    return {cell.split()[0] for cell in cells if cell.startswith("--")}


def _options(verb: str) -> set[str]:
    """Return the options of a verb, less help and the generated ones."""
    parser = Parser("test", "")
    import_module(f"attnplug.cli.{verb}").add_arguments(parser)
    actions = [action for action in parser._actions if action.dest not in {*FIELDS, "help"}]
    return {option for action in actions for option in action.option_strings}


@pytest.mark.parametrize("verb", BUILT_IN)
def test_every_option_of_a_verb_is_in_its_section(verb: str) -> None:
    assert _tabled(_section(verb)) == _options(verb)


def test_every_verb_is_listed_with_its_summary() -> None:
    assert re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.*) \|$", PAGE, re.MULTILINE) == list(BUILT_IN.items())


def test_every_exit_code_is_listed() -> None:
    codes = {value for name, value in vars(exits).items() if name.isupper()}

    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)} == codes


def test_every_measurement_is_listed() -> None:
    names = re.findall(r"^\| `(\w[\w-]*)` \|", _section("bench"), re.MULTILINE)

    assert names == list(bench.SECTIONS)
