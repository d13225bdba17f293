"""
The walk over what is installed, with a guard around each distribution: a malformed neighbour is a note, never a crash and never a lost plugin.

It reads the metadata folders on ``sys.path`` itself. `importlib.metadata` would lose every plugin to one malformed neighbour unless each distribution were guarded
in the same way, and its import alone costs more than everything here. Measured on two shared cores, CPython 3.11, in a fresh process that has imported attrs:

    environment        import importlib.metadata   its entry points, guarded   this walk
    68 distributions   25 ms                       2.9 ms                      2.3 ms
    200 distributions  25 ms                       7.8 ms                      5.5 ms

What is not a folder (a zip archive) and what another finder on ``sys.meta_path`` offers is left to `importlib.metadata`, which is imported only then.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, Final

from attrs import define, field, frozen

from attnplug.discovery.distribution import Distribution, normalized

GROUP: Final = "attnplug.backends"
"""The entry-point group: the name is the backend's, the value is the plugin module."""

_KINDS: Final = (".dist-info", ".egg-info")


@frozen
class Entry:
    """One backend that a distribution offers: nothing but text so far."""

    name: str
    module: str
    distribution: str
    version: str


@frozen
class Note:
    """
    Something odd that was met on the way and did no harm.

    Attributes:
        subject: What it is about: a distribution, a folder, a backend.
        stage: Where it was met: ``scan``, ``manifest``, ``api`` or ``alias``.
        message: What is odd.
    """

    subject: str
    stage: str
    message: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}"


@frozen
class Scan:
    """
    What is installed.

    Attributes:
        entries: The offered backends, by name, then distribution.
        notes: What was odd.
    """

    entries: tuple[Entry, ...]
    notes: tuple[Note, ...]
    _distributions: Mapping[str, Distribution] = field(factory=dict, eq=False, repr=False)

    def version_of(self, name: str) -> str | None:
        """Return the installed version of a distribution, in any spelling of its name, or None."""
        found = self._distributions.get(normalized(name))
        return None if found is None else found.version or None


def scan(path: Sequence[str] | None = None) -> Scan:
    """
    Look for backends.

    Args:
        path: Folders and archives to look in; ``sys.path`` by default. Of two copies of a distribution the first is used, as Python imports the first.
    """
    walk = _Walk()
    for place in dict.fromkeys(path if path is not None else sys.path):
        if isinstance(place, str):
            walk.visit(place)
    walk.visit_finders(path)
    return Scan(
        tuple(sorted(walk.entries, key=lambda e: (e.name, normalized(e.distribution), e.module))),
        tuple(walk.notes),
        walk.found,
    )


@define(eq=False)
class _Walk:
    """What has been found so far."""

    found: dict[str, Distribution] = field(factory=dict)
    entries: list[Entry] = field(factory=list)
    notes: list[Note] = field(factory=list)
    seen: set[str] = field(factory=set)

    def visit(self, place: str) -> None:
        """Take in one item of the path."""
        folder = os.path.realpath(place or os.curdir)
        if folder in self.seen:
            return
        self.seen.add(folder)
        try:
            names = os.listdir(folder)  # noqa: PTH208 - names are all that is needed
        except FileNotFoundError:
            return
        except NotADirectoryError:
            self.visit_archive(folder)
        except OSError as error:
            self.note(folder, f"cannot be listed: {error}")
        else:
            self.visit_folder(folder, names)

    def visit_folder(self, folder: str, names: Iterable[str]) -> None:
        for name in sorted((n for n in names if n.endswith(_KINDS)), key=_newest_last, reverse=True):
            distribution = Distribution.of(folder, name)
            if distribution is None:
                self.note(name, f"is not the name of a distribution, and is passed over; it lies in {folder}")
            else:
                self.guarded(distribution)
        if folder.endswith(".egg"):
            self.visit_archive(folder)  # an egg is an archive, even where it is unpacked

    def visit_archive(self, archive: str) -> None:
        from importlib.metadata import distributions  # noqa: PLC0415 - see the module docstring

        self.adopt(archive, lambda: distributions(path=[archive]))

    def visit_finders(self, path: Sequence[str] | None) -> None:
        """Ask finders other than Python's own; what they repeat of the walk's findings is no second copy."""
        for finder in [f for f in sys.meta_path if f is not PathFinder and hasattr(f, "find_distributions")]:
            from importlib.metadata import DistributionFinder  # noqa: PLC0415 - see the module docstring

            context = DistributionFinder.Context(**({} if path is None else {"path": list(path)}))
            self.adopt(repr(finder), lambda finder=finder, context=context: finder.find_distributions(context))

    def adopt(self, source: str, offer: Any) -> None:
        """Take in what `importlib.metadata` finds, or note what it stumbled over."""
        try:
            for foreign in offer():
                distribution = _adapted(foreign, source)
                if distribution is None:
                    self.note(source, f"offers a distribution without a name: {foreign!r}")
                elif distribution.key not in self.found or distribution.place not in self.places():
                    self.guarded(distribution)
        except Exception as error:  # noqa: BLE001 - foreign code that may fail in any way
            self.note(source, f"cannot list its distributions: {type(error).__name__}: {error}")

    def places(self) -> set[str]:
        return {distribution.place for distribution in self.found.values()}

    def guarded(self, distribution: Distribution) -> None:
        """Read one distribution; whatever is wrong with it stays with it."""
        try:
            text = distribution.entry_points()
        except Exception as error:  # noqa: BLE001 - the guard that this module is about
            text = None
            self.note(
                _label(distribution),
                f"its entry_points.txt cannot be read, and is passed over: {type(error).__name__}: {error}",
            )
        first = self.found.setdefault(distribution.key, distribution)
        if text is None:
            return
        if first is distribution:
            self.read(distribution, text)
        elif any(section == GROUP for section, _ in _lines(text)):
            self.note(
                _label(distribution),
                f"is shadowed by {_label(first)} in {os.path.dirname(first.place)}, and not used; it lies in {distribution.place}",
            )  # noqa: PTH120

    def read(self, distribution: Distribution, text: str) -> None:
        """Take the entries of our group; note the lines, of any group, that other readers of entry points stumble over."""
        for section, line in dict.fromkeys(_lines(text)):
            name, equals, module = (part.strip() for part in line.partition("="))
            if not equals:
                self.note(
                    _label(distribution),
                    f"its entry_points.txt has the line {line!r}, which is no `name = value`; other programs may stop at it",
                )
            elif section == GROUP:
                self.entries.append(Entry(name, module, distribution.name, distribution.version))
                if not is_module(module):
                    self.note(
                        _label(distribution),
                        f"offers {name!r} with the value {module!r}, which is not the dotted name of a module",
                    )

    def note(self, subject: str, message: str) -> None:
        self.notes.append(Note(subject, "scan", message))


def is_module(value: str) -> bool:
    """Whether a text is the dotted name of a module."""
    return all(part.isidentifier() for part in value.split("."))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield (section, line) of an ``entry_points.txt``."""
    section = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif line and not line.startswith(("#", ";")):
            yield section, line


def _newest_last(name: str) -> tuple[str, list[int]]:
    """Order the names in a folder, the versions of one distribution by their numbers: an interrupted upgrade leaves the older one."""
    head, _, rest = name.partition("-")
    return normalized(head), [int(number) for number in re.findall(r"\d+", rest)]


def _label(distribution: Distribution) -> str:
    return f"{distribution.name} {distribution.version}".rstrip()


def _adapted(foreign: Any, source: str) -> Distribution | None:
    """Put a distribution of `importlib.metadata` into our shape."""
    name = foreign.metadata["Name"]
    if not name:
        return None

    def read(file: str) -> bytes | None:
        text = foreign.read_text(file)
        return None if text is None else str(text).encode()

    return Distribution(normalized(name), str(getattr(foreign, "_path", source)), (name, foreign.version or ""), read)
