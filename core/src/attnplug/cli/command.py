"""The commands that distributions add: entry points in the group `attnplug.commands`."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeVar

from attrs import frozen

from attnplug.cli import BUILT_IN
from attnplug.discovery.scan import scan
from attnplug.errors import AttnplugError, PluginError, PluginLoadError, exception_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Collection, Iterator
    from types import ModuleType

    from attnplug.discovery.scan import Entry

KNOWN: Final = {
    "attnplug-kit": ("check", "new", "bench"),
    "attnplug-transformers": ("demo",),
}
"""The commands of this project's other distributions, for the line that says what to install."""

T = TypeVar("T")

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
        problem: What is wrong with an entry point; empty where nothing is.
    """

    name: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    problem: str = ""

    def load(self) -> ModuleType:
        """
        Import the module of the command.

        Raises:
            PluginLoadError: It cannot be imported, lacks a member, has one of another type, or two entry points offer
                the name.
        """
        if self.problem:
            raise PluginLoadError(
                f"the command {self.name!r} of {self.distributions[0]} cannot be used: {self.problem}",
                "",
                self._repair,
            )
        if len(self.modules) > 1:
            raise PluginLoadError(
                f"the command {self.name!r} is offered by {' and by '.join(self.distributions)}",
                "a command belongs to one distribution",
                "uninstall all but one of them"
                if len(set(self.distributions)) > 1
                else f"install {self._distribution} again, in a version that offers {self.name!r} once",
            )
        module = self.calling("cannot be imported:", lambda: import_module(self.modules[0]))
        lacking = [name for name in _MEMBERS if not self.calling("cannot be imported:", partial(hasattr, module, name))]
        if lacking:
            raise PluginLoadError(
                f"the command {self.name!r} of {self.distributions[0]} lacks {', '.join(lacking)}",
                f"a command's module has {', '.join(_MEMBERS)}",
                f"add {lacking[0]} to {self.modules[0]}, see attnplug.commands",
            )
        self._check_types(module)
        return module

    def calling(self, what: str, call: Callable[[], T]) -> T:
        """
        Call code of the command's module; return what it returns.

        Args:
            what: What fails where it raises something, such as ``"cannot be imported:"``.
            call: The code.

        Raises:
            PluginLoadError: It raises anything but the user's interrupt.
        """
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise PluginLoadError(
                f"the command {self.name!r} of {self.distributions[0]} {what} {exception_text(error)}",
                "",
                self._repair,
            ) from error

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
        try:
            code = module.run(arguments)
        except (AttnplugError, BrokenPipeError, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginError(
                f"the command {self.name!r} of {self.distributions[0]} raised {exception_text(error)}",
                "",
                f"set ATTNPLUG_STRICT=1 to see where, and report it to the authors of {self._distribution}",
            ) from error
        if not isinstance(code, int):
            raise PluginError(
                f"run of the command {self.name!r} of {self.distributions[0]} returned a {type(code).__name__}",
                "it returns the exit code",
                f"correct run in {self.modules[0]}, see attnplug.commands",
            )
        return int(code)

    def _check_types(self, module: ModuleType) -> None:
        wrong = [name for name in _MEMBERS[1:] if not callable(getattr(module, name))]
        wrong += [] if isinstance(module.SUMMARY, str) else ["SUMMARY"]
        if wrong:
            kind = type(getattr(module, wrong[0])).__name__
            raise PluginLoadError(
                f"{wrong[0]} of the command {self.name!r} of {self.distributions[0]} is of the type {kind}",
                "SUMMARY is a text, add_arguments and run are functions",
                f"correct {wrong[0]} in {self.modules[0]}, see attnplug.commands",
            )

    @property
    def _distribution(self) -> str:
        return self.distributions[0].partition(" ")[0]

    @property
    def _repair(self) -> str:
        return f"reinstall or remove {self._distribution}"


def installed_commands() -> dict[str, Command]:
    """Return the commands that installed distributions add, by name."""
    offers: dict[str, list[Entry]] = {}
    for entry in _entries():
        if entry.name not in BUILT_IN:
            offers.setdefault(entry.name, []).append(entry)
    return {
        name: Command(
            name,
            tuple(entry.module for entry in found),
            tuple(map(_label, found)),
            next((entry.problem for entry in found if entry.problem), ""),
        )
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
