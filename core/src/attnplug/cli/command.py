"""The commands that distributions add: entry points in the group `attnplug.commands`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.cli import BUILT_IN
from attnplug.discovery.scan import scan
from attnplug.errors import PluginLoadError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import ModuleType

    from attnplug.discovery.scan import Entry

KNOWN: Final = {
    "attnplug-kit": ("check", "new", "bench"),
    "attnplug-transformers": ("demo",),
}
"""The commands of this project's other distributions, for the line that says what to install."""

_GROUP: Final = "attnplug.commands"
_MEMBERS: Final = ("SUMMARY", "add_arguments", "run")


@frozen
class Command:
    """
    A command that a distribution adds. Nothing of it is imported until `load`.

    Attributes:
        name: The command's name.
        modules: The modules that offer it; more than one is a conflict, and none is used.
        distributions: The distributions that they come from, with their versions.
    """

    name: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]

    def load(self) -> ModuleType:
        """
        Import the module of the command.

        Raises:
            PluginLoadError: It cannot be imported, lacks a member, or two distributions offer the name.
        """
        if len(self.modules) > 1:
            raise PluginLoadError(
                f"the command {self.name!r} is offered by {' and by '.join(self.distributions)}",
                "a command belongs to one distribution",
                "uninstall all but one of them",
            )
        try:
            module = import_module(self.modules[0])
            lacking = [member for member in _MEMBERS if not hasattr(module, member)]
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"the command {self.name!r} of {self.distributions[0]} cannot be imported:"
                f" {type(error).__name__}: {error}",
                "",
                f"reinstall or remove {self.distributions[0].partition(' ')[0]}",
            ) from error
        if lacking:
            raise PluginLoadError(
                f"the command {self.name!r} of {self.distributions[0]} lacks {', '.join(lacking)}",
                f"a command's module has {', '.join(_MEMBERS)}",
                f"add {lacking[0]} to {self.modules[0]}, see attnplug.commands",
            )
        return module

    def summary(self) -> str:
        """Return the command's summary, or why it cannot run."""
        try:
            return str(self.load().SUMMARY)
        except PluginLoadError as error:
            return f"broken: {error.problem}"


def installed_commands() -> dict[str, Command]:
    """Return the commands that installed distributions add, by name."""
    offers: dict[str, list[Entry]] = {}
    for entry in _entries():
        if entry.name not in BUILT_IN:
            offers.setdefault(entry.name, []).append(entry)
    return {
        name: Command(name, tuple(entry.module for entry in found), tuple(map(_label, found)))
        for name, found in sorted(offers.items())
    }


def ignored_commands() -> Iterator[str]:
    """Yield a line for each entry that names a built-in command, and is ignored for that reason."""
    for entry in _entries():
        if entry.name in BUILT_IN:
            yield f"{entry.name} of {_label(entry)} is ignored: a built-in command cannot be replaced"


def missing_commands(installed: Collection[str]) -> Iterator[str]:
    """Yield a line for each distribution of this project whose commands are not installed."""
    for distribution, names in KNOWN.items():
        if not set(names) & set(installed):
            yield f"{', '.join(names)}: install {distribution}"


def _entries() -> tuple[Entry, ...]:
    return scan(group=_GROUP).entries


def _label(entry: Entry) -> str:
    return f"{entry.distribution} {entry.version}".strip()
