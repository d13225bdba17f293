"""
The scan for installed distributions: their entry points of one group, each read by itself.

`importlib.metadata` stops at the first distribution whose metadata is damaged, and takes 20 ms to import. So folders
are listed here; archives and foreign finders are left to it.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug._foreign import ForeignCode, shortened
from attnplug._version import __version__
from attnplug.discovery.distribution import CORE, KINDS, LONGEST, Distribution, Entry, adapted, normalized
from attnplug.manifest.schema import GROUP, is_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_MOST_ENTRIES: Final = 100  # entry points of one group
_MOST_OFFERED: Final = 5_000  # distributions of one archive or finder


@frozen
class Diagnostic:
    """
    Something odd that was found and does no harm.

    Attributes:
        subject: What it is about: a distribution, a folder, a backend.
        stage: Where it was found: ``scan``, ``settings``, ``manifest``, ``api``, ``alias``, ``evidence`` or
            ``profile``.
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
        entries: The entry points, by name, then distribution.
        notes: What is odd.
    """

    entries: tuple[Entry, ...]
    notes: tuple[Diagnostic, ...]
    _distributions: Mapping[str, Distribution] = field(factory=dict, eq=False, repr=False)

    def version_of(self, name: str) -> str | None:
        """Return the installed version of a distribution, in any spelling of its name, or None."""
        if normalized(name) == CORE:
            return __version__
        found = self._distributions.get(normalized(name))
        return None if found is None else found.version or None


def scan(path: Sequence[str] | None = None, *, group: str = GROUP) -> Scan:
    """
    Look for the entry points of a group.

    Args:
        path: Folders and archives to look in; ``sys.path`` by default. Of two copies of a distribution the first is
            used, as Python imports the first.
        group: The entry-point group; backends by default.
    """
    walk = _Walk(group)
    for place in dict.fromkeys(path if path is not None else sys.path):
        if isinstance(place, str):
            walk.visit(place)
    walk.visit_finders(path)
    return Scan(
        tuple(sorted(walk.entries, key=lambda e: (e.name, normalized(e.distribution), e.module))),
        tuple(walk.notes),
        walk.found,
    )


class _Walk:
    """A scan in progress: what has been found so far."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.found: dict[str, Distribution] = {}
        self.entries: list[Entry] = []
        self.notes: list[Diagnostic] = []
        self.seen: set[str] = set()

    def visit(self, place: str) -> None:
        """Take in one item of the path, of which two may be the same folder."""
        try:
            folder = os.path.realpath(place or os.curdir)
            if folder in self.seen:
                return
            self.seen.add(folder)
            names = os.listdir(folder)  # noqa: PTH208 - names are all that is needed
        except FileNotFoundError:
            return
        except NotADirectoryError:
            if os.path.isfile(folder):  # noqa: PTH113 - as above; opening a FIFO as an archive would wait forever
                self.visit_archive(folder)
        except (OSError, ValueError) as error:
            self.note(place, f"cannot be listed: {error}")
        else:
            self.visit_folder(folder, names)

    def visit_folder(self, folder: str, names: Iterable[str]) -> None:
        for name in sorted((n for n in names if n.endswith(KINDS)), key=_newest_last, reverse=True):
            distribution = Distribution.of(folder, name)
            if distribution is None:
                self.note(name, f"is not the name of a distribution, and is ignored; it is in {folder}")
            else:
                self.guarded(distribution)
        if folder.endswith(".egg"):
            self.visit_archive(folder)  # an egg is an archive, even where it is unpacked

    def visit_archive(self, archive: str) -> None:
        from importlib.metadata import distributions  # noqa: PLC0415 - see the module's docstring

        self.adopt(archive, lambda: distributions(path=[archive]))

    def visit_finders(self, path: Sequence[str] | None) -> None:
        """Take in what finders other than Python's own offer."""
        for finder in [f for f in sys.meta_path if f is not PathFinder]:
            name = f"a finder of {type(finder).__module__}"
            with ForeignCode("cannot list its distributions:") as code:
                find = getattr(finder, "find_distributions", None)
                name = repr(finder)
            if code.error is not None:
                self.note(name, code.problem)
            elif find is not None:
                from importlib.metadata import DistributionFinder  # noqa: PLC0415 - see the module's docstring

                options: dict[str, Any] = {} if path is None else {"path": list(path)}
                self.adopt(name, partial(find, DistributionFinder.Context(**options)))

    def adopt(self, source: str, offer: Callable[[], Iterable[Any]]) -> None:
        """Take in what `importlib.metadata` finds, or note its failure."""
        with ForeignCode("cannot list its distributions:") as code:
            for number, foreign in enumerate(offer()):
                if number == _MOST_OFFERED:
                    self.note(source, f"offers more than {_MOST_OFFERED:,} distributions, and the rest is not read")
                    break
                self.adopt_one(source, foreign)
        if code.error is not None:
            self.note(source, code.problem)

    def adopt_one(self, source: str, foreign: Any) -> None:
        with ForeignCode("offers a distribution that cannot be read:") as code:
            distribution = adapted(foreign, source)
        if code.error is not None:
            self.note(source, code.problem)
            return
        known = self.found.get(distribution.key)
        if (
            known is None or known.place != distribution.place
        ):  # a finder may repeat what the walk has found: that is no second copy
            self.guarded(distribution)

    def guarded(self, distribution: Distribution) -> None:
        """Read one distribution. What is wrong with it becomes a note, and hides no other."""
        if distribution.key == CORE:
            self.pass_over_core(distribution)
            return
        if distribution.is_unnumbered:
            self.note(distribution.place, "has no version, as after an interrupted installation, and is passed over")
            return
        first = self.found.setdefault(distribution.key, distribution)  # Python imports the first copy on the path
        with ForeignCode("its entry_points.txt cannot be read:") as code:
            text = distribution.entry_points()
            if text and first is distribution:
                self.read(distribution, text)
            elif text and _parse(text, self.group)[0]:
                used = f"{_label(first)} in {first.place!r}"
                self.note(_label(distribution), f"in {distribution.place!r} is shadowed by {used}, and not used")
        if code.error is not None:
            self.note(_label(distribution), code.problem)

    def pass_over_core(self, distribution: Distribution) -> None:
        """Take in nothing of what has core's name: the built-in backend comes from the core that runs."""
        if distribution.version != __version__:
            self.note(
                _label(distribution),
                f"in {distribution.place!r} is not this core, which is {CORE} {__version__}, and is passed over",
            )

    def read(self, distribution: Distribution, text: str) -> None:
        """Take the entries of the group, and note lines of any group at which other programs fail."""
        entries, odd = _parse(text, self.group)
        if odd:
            more = f"; {len(odd):,} lines are like that" if len(odd) > 1 else ""
            self.note(
                _label(distribution),
                f"its entry_points.txt has the line {shortened(repr(odd[0]))}, which is no `name = value`{more}",
            )
        if not entries:
            return
        problem = distribution.problem
        if len(entries) > _MOST_ENTRIES:
            problem = f"it offers {len(entries):,} entry points in the group {self.group}, at most {_MOST_ENTRIES}"
        for name, module in entries[:_MOST_ENTRIES]:
            self.take(_entry(name, module, distribution, problem))

    def take(self, entry: Entry) -> None:
        self.entries.append(entry)
        subject = f"{entry.distribution} {entry.version}"
        if entry.problem:
            self.note(subject, f"offers {entry.name!r}, which cannot be used: {entry.problem}")
        elif not is_module(entry.module):
            self.note(
                subject, f"offers {entry.name!r} with the value {entry.module!r}, which is no module's dotted name"
            )

    def note(self, subject: str, message: str) -> None:
        self.notes.append(Diagnostic(subject, "scan", message))


def _parse(text: str, group: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the (name, value) pairs of a group in an ``entry_points.txt``, and the lines that are no such pair."""
    pairs: dict[tuple[str, str], None] = {}
    odd: dict[tuple[str, str], None] = {}
    section = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif not line or line.startswith(("#", ";")):
            continue
        elif "=" not in line:
            odd[section, line] = None
        elif section == group:
            name, _, value = line.partition("=")
            pairs[name.strip(), value.strip()] = None
    return list(pairs), [line for _, line in odd]


def _entry(name: str, module: str, distribution: Distribution, problem: str) -> Entry:
    """Return one entry point, its texts short enough to be shown."""
    if max(len(name), len(module)) > LONGEST:
        long = "name" if len(name) > LONGEST else "value"
        count = len(name if len(name) > LONGEST else module)
        problem = problem or f"the {long} of its entry point has {count:,} characters, and a name has at most {LONGEST}"
        name, module = shortened(name), shortened(module)
    return Entry(name, module, distribution.name, distribution.version, problem)


def _newest_last(name: str) -> tuple[str, list[int]]:
    """Order names, the versions of one distribution by their numbers: an interrupted upgrade leaves the older one."""
    head, _, rest = name.partition("-")
    return normalized(head), [int(number) for number in re.findall(r"\d+", rest)]


def _label(distribution: Distribution) -> str:
    return f"{distribution.name} {distribution.version}".rstrip()
