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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.errors import exception_text, shortened
from attnplug.manifest.schema import GROUP, is_module
from attnplug.request.files import read_bytes, read_capped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_RUNS: Final = re.compile(r"[-_.]+")
_VALID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_METADATA: Final = ("METADATA", "PKG-INFO")

# Far more than any real distribution has. What is larger costs other distributions their time.
_LARGEST: Final = {"entry_points.txt": 2**20}
_LARGEST_METADATA: Final = 4 * 2**20
_MOST_ENTRIES: Final = 100  # entry points of one group
_LONGEST: Final = 255  # characters of a name or a version, as of a file's name


def normalized(name: str) -> str:
    """Return the one spelling of a distribution's name, in which ``Flash_Attn`` is ``flash-attn`` (PEP 503)."""
    return _RUNS.sub("-", name).lower()


@frozen(eq=False)
class Distribution:
    """
    A distribution. Its files are read when they are needed.

    Attributes:
        key: Its normalized name.
        place: The folder of its metadata, for messages.
    """

    key: str
    place: str
    _stem: tuple[str, str]
    _read: Callable[[str], bytes | None]
    _known: list[Header] = field(factory=list, init=False)

    @classmethod
    def of(cls, folder: str, name: str) -> Distribution | None:
        """
        Return the distribution of one name in a folder on ``sys.path``.

        Returns:
            None where the name is not that of a distribution, such as what an interrupted uninstallation leaves behind
            (``~orch-2.0.dist-info``).
        """
        stem, place = _split(name), f"{folder}/{name}"
        valid = _VALID.fullmatch(stem[0]) is not None
        return cls(normalized(stem[0]), place, stem, partial(_read_file, place)) if valid else None

    @property
    def name(self) -> str:
        """Its name as its author writes it."""
        return self._header.name or self._stem[0]

    @property
    def version(self) -> str:
        """Its version; empty where neither its metadata nor the name of its folder has one."""
        return self._header.version or self._stem[1]

    @property
    def problem(self) -> str:
        """What is wrong with its metadata; empty where nothing is. It is then known by the name of its folder."""
        return self._header.problem

    def entry_points(self) -> str | None:
        """
        Return the text of its entry points, or None where it has none.

        Raises:
            OSError: The file cannot be read, is no regular file, or is too large.
            UnicodeDecodeError: It is not UTF-8.
        """
        content = self._read("entry_points.txt")
        return None if content is None else content.decode("utf-8")

    @property
    def _header(self) -> Header:
        if not self._known:
            self._known.append(read_header(self._read))
        return self._known[0]


@frozen
class Header:
    """
    What is read of a distribution's metadata.

    Attributes:
        name: Its name; empty where there is none, or none that can be used.
        version: Its version, likewise.
        problem: What is wrong; empty where nothing is.
    """

    name: str = ""
    version: str = ""
    problem: str = ""


def read_header(read: Callable[[str], bytes | None]) -> Header:
    """Read the metadata of a distribution. What is wrong with it becomes the header's problem."""
    problem = ""
    for file in _METADATA:
        try:
            content = read(file)
        except Exception as error:  # noqa: BLE001 - whatever is wrong, other distributions are read
            problem = problem or f"its {file} cannot be read: {exception_text(error)}"
            continue
        if content is not None:
            head = content.decode("utf-8", "replace").replace("\r\n", "\n").partition("\n\n")[0]
            return _checked(dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", head, re.MULTILINE)), problem)
    return Header(problem=problem)


def _checked(found: Mapping[str, str], problem: str) -> Header:
    """Return a header without what is too long to be shown or compared."""
    long = [name for name, value in found.items() if len(value) > _LONGEST]
    for name in long:
        problem = problem or f"its {name.lower()} has {len(found[name]):,} characters, and at most {_LONGEST} are read"
    name, version = ("" if each in long else found.get(each, "") for each in ("Name", "Version"))
    return Header(name, version, problem)


def _limit(file: str) -> int:
    return _LARGEST.get(file, _LARGEST_METADATA)


def _read_file(place: str, file: str) -> bytes | None:
    """Read a file of a metadata folder, or metadata that is a single file (distutils)."""
    try:
        return read_bytes(f"{place}/{file}", _limit(file))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return read_bytes(place, _limit(file)) if file == "PKG-INFO" else None


def _split(name: str) -> tuple[str, str]:
    """Split ``name-version.dist-info`` and ``name-version-py3.11.egg-info``; either may lack its version."""
    stem, _, kind = name.rpartition(".")
    if kind == "dist-info":
        head, dash, version = stem.rpartition("-")
        return (head, version) if dash else (stem, "")
    head, _, rest = stem.partition("-")
    return head, rest.partition("-")[0]


_KINDS: Final = (".dist-info", ".egg-info")


@frozen
class Entry:
    """
    One entry point of a distribution: nothing but text so far.

    Attributes:
        name: Its name.
        module: Its value: the dotted name of a module.
        distribution: The distribution's name.
        version: The distribution's version.
        problem: Why it cannot be used; empty where nothing is known to be wrong.
    """

    name: str
    module: str
    distribution: str
    version: str
    problem: str = ""


@frozen
class Diagnostic:
    """
    Something odd that was found and does no harm.

    Attributes:
        subject: What it is about: a distribution, a folder, a backend.
        stage: Where it was found: ``scan``, ``manifest``, ``api``, ``alias`` or ``evidence``.
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
        for name in sorted((n for n in names if n.endswith(_KINDS)), key=_newest_last, reverse=True):
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
            try:
                find = getattr(finder, "find_distributions", None)
                name = repr(finder)
            except Exception as error:  # noqa: BLE001 - foreign code that may fail in any way
                self.note(name, f"cannot list its distributions: {exception_text(error)}")
                continue
            if find is not None:
                from importlib.metadata import DistributionFinder  # noqa: PLC0415 - see the module's docstring

                options: dict[str, Any] = {} if path is None else {"path": list(path)}
                self.adopt(name, partial(find, DistributionFinder.Context(**options)))

    def adopt(self, source: str, offer: Callable[[], Iterable[Any]]) -> None:
        """Take in what `importlib.metadata` finds, or note its failure."""
        try:
            for foreign in offer():
                self.adopt_one(source, foreign)
        except Exception as error:  # noqa: BLE001 - foreign code that may fail in any way
            self.note(source, f"cannot list its distributions: {exception_text(error)}")

    def adopt_one(self, source: str, foreign: Any) -> None:
        try:
            distribution = _adapted(foreign, source)
        except Exception as error:  # noqa: BLE001 - foreign code that may fail in any way
            self.note(source, f"offers a distribution that cannot be read: {exception_text(error)}")
            return
        known = self.found.get(distribution.key)
        if (
            known is None or known.place != distribution.place
        ):  # a finder may repeat what the walk has found: that is no second copy
            self.guarded(distribution)

    def guarded(self, distribution: Distribution) -> None:
        """Read one distribution. What is wrong with it becomes a note, and hides no other."""
        first = self.found.setdefault(distribution.key, distribution)  # Python imports the first copy on the path
        try:
            text = distribution.entry_points()
        except Exception as error:  # noqa: BLE001 - foreign code that may fail in any way
            self.note(_label(distribution), f"its entry_points.txt cannot be read: {exception_text(error)}")
            return
        if text and first is distribution:
            self.read(distribution, text)
        elif text and _parse(text, self.group)[0]:
            used = f"{_label(first)} in {first.place!r}"
            self.note(_label(distribution), f"in {distribution.place!r} is shadowed by {used}, and not used")

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
    if max(len(name), len(module)) > _LONGEST:
        long = "name" if len(name) > _LONGEST else "value"
        count = len(name if len(name) > _LONGEST else module)
        problem = (
            problem or f"the {long} of its entry point has {count:,} characters, and a name has at most {_LONGEST}"
        )
        name, module = shortened(name), shortened(module)
    return Entry(name, module, distribution.name, distribution.version, problem)


def _newest_last(name: str) -> tuple[str, list[int]]:
    """Order names, the versions of one distribution by their numbers: an interrupted upgrade leaves the older one."""
    head, _, rest = name.partition("-")
    return normalized(head), [int(number) for number in re.findall(r"\d+", rest)]


def _label(distribution: Distribution) -> str:
    return f"{distribution.name} {distribution.version}".rstrip()


def _adapted(foreign: Any, source: str) -> Distribution:
    """Return a distribution of `importlib.metadata` as one of ours."""
    place = getattr(foreign, "_path", None)
    if hasattr(place, "joinpath"):  # a folder in an archive, or in an egg: read as carefully as every other folder
        read = partial(_read_member, place)
        header = read_header(read)
        name = header.name or _split(str(getattr(place, "name", "")))[0] or "(no name)"
        return Distribution(normalized(name), str(place), (name, header.version), read)
    name, version = str(foreign.metadata["Name"] or "(no name)"), str(foreign.version or "")
    return Distribution(normalized(name), source, (name, version), partial(_read_foreign, foreign))


def _read_member(folder: Any, file: str) -> bytes | None:
    """Read a file of a folder in an archive, where sizes may be wrong: what is compressed may be of any size."""
    path = folder.joinpath(file)
    if isinstance(folder, Path):
        return _read_file(str(folder), file)
    try:
        with path.open("rb") as stream:
            return read_capped(stream.read, path, _limit(file))
    except (FileNotFoundError, KeyError, IsADirectoryError, NotADirectoryError):
        return None


def _read_foreign(foreign: Any, file: str) -> bytes | None:
    """Read through the code of a foreign finder, which has read all of it by then."""
    text = foreign.read_text(file)
    return None if text is None else str(text).encode()
