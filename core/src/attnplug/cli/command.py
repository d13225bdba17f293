"""The commands that distributions add: entry points in the group `attnplug.commands`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from attrs import frozen

from attnplug.cli import BUILT_IN, HELP
from attnplug.cli.extension import Extension, entries_of, label_of, offered
from attnplug.errors import PluginLoadError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Iterator
    from types import ModuleType

KNOWN: Final = {
    "attnplug-kit": ("check", "new", "bench", "tune", "report", "replay", "trace"),
    "attnplug-transformers": ("demo",),
}
"""The commands of this project's other distributions, for the line that says what to install."""

_GROUP: Final = "attnplug.commands"


@frozen
class Command(Extension):
    """A command that a distribution adds."""

    kind: ClassVar[str] = "command"
    functions: ClassVar[tuple[str, ...]] = ("add_arguments", "run")
    texts: ClassVar[tuple[str, ...]] = ("SUMMARY",)
    reference: ClassVar[str] = "attnplug.commands"

    def summary(self) -> str:
        """Return the first line of the command's summary, or why it cannot run."""
        try:
            text = self.load().SUMMARY
        except PluginLoadError as error:
            return f"broken: {error.problem}"
        return next(iter(text.splitlines()), "")

    def run(self, module: ModuleType, arguments: Namespace) -> int:
        """
        Run the command's module.

        Raises:
            PluginError: It raises an error that is not one of this project, or returns no exit code.
        """
        code = self.running(lambda: module.run(arguments), BrokenPipeError, SystemExit)
        if not isinstance(code, int):
            raise self.wrong_return("run", code, "the exit code")
        return int(code)


def installed_commands() -> dict[str, Command]:
    """Return the commands that installed distributions add, by name."""
    return offered(Command, tuple(entry for entry in entries_of(_GROUP) if entry.name not in (*BUILT_IN, HELP)))


def ignored_commands() -> Iterator[str]:
    """Yield a line for each entry that names a built-in command, and is ignored for that reason."""
    for entry in entries_of(_GROUP):
        if entry.name in (*BUILT_IN, HELP):
            yield f"{entry.name} of {label_of(entry)} is ignored: a built-in command cannot be replaced"


def missing_commands(installed: Collection[str]) -> Iterator[str]:
    """Yield a line for each distribution of this project whose commands are not installed."""
    for distribution, names in KNOWN.items():
        if not set(names) & set(installed):
            yield f"{', '.join(names)}: install {distribution}"
