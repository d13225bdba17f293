"""
Completion in a shell, by argcomplete: the extra ``attnplug[completion]``.

``eval "$(register-python-argcomplete attnplug)"`` makes a shell start this program with ``_ARGCOMPLETE`` set; nothing
here is imported otherwise.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnplug.cli import BUILT_IN, HELP
from attnplug.cli.command import installed_commands
from attnplug.errors import AttnplugError

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "_ARGCOMPLETE"
"""What a shell sets where it requests completions."""


def complete() -> None:
    """Print the completions of the line that the shell is at, and exit."""
    import argcomplete  # noqa: PLC0415 - optional, and a shell has asked for it

    argcomplete.autocomplete(line_parser(os.environ.get("COMP_LINE", "")), always_complete_options="long")


def line_parser(line: str) -> argparse.ArgumentParser:
    """
    Return a parser of every command. Only the command of the line is imported, for its options.

    Args:
        line: The command line as far as it is typed.
    """
    words = line.split()
    current = words[1] if len(words) > 1 else ""
    parser = argparse.ArgumentParser("attnplug", allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    installed = installed_commands()
    for name in (*BUILT_IN, *installed):
        of_command = commands.add_parser(name, allow_abbrev=False)
        if name == current:
            try:
                module = import_module(f"attnplug.cli.{name}") if name in BUILT_IN else installed[name].load()
            except AttnplugError:
                continue  # a broken command has no options; running it says why
            module.add_arguments(of_command)
            _add_values(of_command)
    commands.add_parser(HELP, allow_abbrev=False).add_argument("command", nargs="?", choices=(*BUILT_IN, *installed))
    return parser


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Let options complete to what they may be: devices, and installed backends."""
    values = {"device": _devices, "backend": _backends}
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of its options
        if action.dest in values and action.choices is None:
            action.completer = values[action.dest]  # type: ignore[attr-defined]  # argcomplete's own attribute


def _devices(**_: Any) -> Iterator[str]:
    from attnplug.request.capability import HARDWARE  # noqa: PLC0415 - for one option
    from attnplug.request.device_names import PRODUCTS  # noqa: PLC0415 - likewise

    yield from ("current", "cpu", *PRODUCTS)
    yield from (f"sm{each.major}{each.minor}" for each in HARDWARE)


def _backends(**_: Any) -> Iterator[str]:
    from attnplug.discovery.registry import Registry  # noqa: PLC0415 - for one option
    from attnplug.request.settings import Settings  # noqa: PLC0415 - likewise

    candidates = Registry.scan(Settings.read()).candidates()
    yield from dict.fromkeys(name for each in candidates for name in (each.backend, each.id))
    yield "auto"
