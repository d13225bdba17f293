"""The page about the command line names what the command line has, and nothing else."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnplug import commands
from attnplug.cli import BUILT_IN
from attnplug.cli.command import installed_commands
from attnplug.cli.parser import Parser
from attnplug.request.device_names import PRODUCTS
from attnplug.request.fields import FIELDS
from attnplug_kit import bench

if TYPE_CHECKING:
    from types import ModuleType

MODULES = {
    **{name: import_module(f"attnplug.cli.{name}") for name in BUILT_IN},
    **{name: command.load() for name, command in installed_commands().items()},
}
PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "command-line.md").read_text("utf-8")


def _section(command: str) -> str:
    return PAGE.partition(f"\n## {command}\n")[2].partition("\n## ")[0]


def _tabled(text: str) -> set[str]:
    """Return the options in the first column of the tables."""
    cells = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    return {cell.split()[0] for cell in cells if cell.startswith("--")}


def _options(module: ModuleType) -> set[str]:
    """Return the options of a command, less help and the generated ones."""
    parser = Parser("test", "")
    module.add_arguments(parser)
    actions = [action for action in parser._actions if action.dest not in {*FIELDS, "help"}]
    return {option for action in actions for option in action.option_strings}


@pytest.mark.parametrize("command", MODULES)
def test_every_option_of_a_command_is_in_its_section(command: str) -> None:
    options = _options(MODULES[command])

    assert options - {"--json"} <= set(re.findall(r"(?<!\w)--[\w-]+", _section(command)))  # `--json` is told once
    assert _tabled(_section(command)) <= options


def test_every_command_is_listed_with_its_summary() -> None:
    summaries = {name: BUILT_IN.get(name) or module.SUMMARY for name, module in MODULES.items()}

    assert dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.*) \|$", PAGE, re.MULTILINE)) == summaries


def test_every_product_is_listed_with_its_device_and_source() -> None:
    rows = re.findall(r"^\| (`.+`) \| `([^`]+)` \|$", _section("explain"), re.MULTILINE)
    listed = {(name, device) for names, device in rows for name in re.findall(r"`([^`]+)`", names)}

    assert listed >= {(each.name, each.device) for each in PRODUCTS.values()}
    assert {each.source for each in PRODUCTS.values()} <= set(re.findall(r"\]\((https:[^)]+)\)", _section("explain")))


def test_every_exit_code_is_listed() -> None:
    codes = {commands.OK, commands.NO, commands.WRONG, commands.INTERRUPTED, commands.PIPE_CLOSED}

    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)} == codes


def test_every_measurement_is_listed() -> None:
    names = re.findall(r"^\| `(\w[\w-]*)` \|", _section("bench"), re.MULTILINE)

    assert names == list(bench.SECTIONS)
