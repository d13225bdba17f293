"""What distributions add to the command line by an entry point: a module with certain members, loaded with care."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, TypeVar

from attrs import frozen

from attnplug._foreign import ForeignCode
from attnplug.discovery.scan import scan
from attnplug.errors import AttnplugError, PluginError, PluginLoadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from attnplug.discovery.distribution import Entry

T = TypeVar("T")
E = TypeVar("E", bound="Extension")


@frozen
class Extension:
    """
    An entry point of a distribution. Nothing of it is imported until `load`.

    Attributes:
        name: Its name.
        modules: The modules that offer it; more than one is a conflict, and none is used.
        distributions: The distributions that they come from, with their versions.
        problem: What is wrong with an entry point; empty where nothing is.
        kind: What it is, in messages.
        functions: The functions that its module has.
        texts: The texts that its module has.
        reference: The module that describes it.
    """

    name: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    problem: str = ""
    kind: ClassVar[str]
    functions: ClassVar[tuple[str, ...]]
    texts: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[str]

    def load(self) -> ModuleType:
        """
        Import the module.

        Raises:
            PluginLoadError: It cannot be imported, lacks a member, has one of another type, or two entry points offer
                the name.
        """
        if self.problem:
            raise PluginLoadError(f"{self.label} cannot be used: {self.problem}", "", self._repair)
        if len(self.modules) > 1:
            raise PluginLoadError(
                f"the {self.kind} {self.name!r} is offered by {' and by '.join(self.distributions)}",
                f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind} belongs to one distribution",
                "uninstall all but one of them"
                if len(set(self.distributions)) > 1
                else f"install {self.distribution} again, in a version that offers {self.name!r} once",
            )
        module = self.calling("cannot be imported:", lambda: import_module(self.modules[0]))
        members = (*self.texts, *self.functions)
        lacking = [name for name in members if not self.calling("cannot be imported:", partial(hasattr, module, name))]
        if lacking:
            raise PluginLoadError(
                f"{self.label} lacks {', '.join(lacking)}",
                f"the module of {'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind} has {', '.join(members)}",
                f"add {lacking[0]} to {self.modules[0]}, see {self.reference}",
            )
        self._check_types(module)
        return module

    def calling(self, what: str, call: Callable[[], T]) -> T:
        """
        Call code of the module; return what it returns.

        Args:
            what: What fails where it raises something, such as ``"cannot be imported:"``.
            call: The code.

        Raises:
            PluginLoadError: It raises anything but the user's interrupt.
        """
        with ForeignCode(f"{self.label} {what}", partial(PluginLoadError, expected="", fix=self._repair)):
            return call()

    def running(self, call: Callable[[], T], *raised: type[BaseException]) -> T:
        """
        Call a function of the module for what it is there for; return what it returns.

        Args:
            call: The code.
            raised: What it may raise beside errors of this project.

        Raises:
            PluginError: It raises anything else.
        """
        fix = f"set ATTNPLUG_STRICT=1 to see where, and report it to the authors of {self.distribution}"
        refuse = partial(PluginError, expected="", fix=fix)
        with ForeignCode(f"{self.label} raised", refuse, passing=(AttnplugError, *raised)):
            return call()

    def wrong_return(self, function: str, returned: object, expected: str) -> PluginError:
        """Return the error for a function that returns something else."""
        return PluginError(
            f"{function} of {self.label} returned a {type(returned).__name__}",
            f"it returns {expected}",
            f"correct {function} in {self.modules[0]}, see {self.reference}",
        )

    @property
    def label(self) -> str:
        """What it is, its name and where it comes from, for messages."""
        return f"the {self.kind} {self.name!r} of {self.distributions[0]}"

    @property
    def distribution(self) -> str:
        """The name of the distribution that offers it, the first of several."""
        return self.distributions[0].partition(" ")[0]

    def _check_types(self, module: ModuleType) -> None:
        wrong = [name for name in self.functions if not callable(getattr(module, name))]
        wrong += [name for name in self.texts if not isinstance(getattr(module, name), str)]
        if wrong:
            texts = [f"{', '.join(self.texts)} is a text"] if self.texts else []
            raise PluginLoadError(
                f"{wrong[0]} of {self.label} is of the type {type(getattr(module, wrong[0])).__name__}",
                ", ".join([*texts, f"{' and '.join(self.functions)} are functions"]),
                f"correct {wrong[0]} in {self.modules[0]}, see {self.reference}",
            )

    @property
    def _repair(self) -> str:
        return f"reinstall or remove {self.distribution}"


def offered(kind: type[E], entries: tuple[Entry, ...]) -> dict[str, E]:
    """Return what entry points offer, by name."""
    offers: dict[str, list[Entry]] = {}
    for entry in entries:
        offers.setdefault(entry.name, []).append(entry)
    return {
        name: kind(
            name,
            tuple(entry.module for entry in found),
            tuple(map(label_of, found)),
            next((entry.problem for entry in found if entry.problem), ""),
        )
        for name, found in sorted(offers.items())
    }


def entries_of(group: str) -> tuple[Entry, ...]:
    """Return the entry points of a group, by name."""
    return scan(group=group).entries


def label_of(entry: Entry) -> str:
    """Return the distribution of an entry point, with its version."""
    return f"{entry.distribution} {entry.version}".strip()
