"""One distribution: its name, its version and its entry points, read without trusting any of its files."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug._foreign import ForeignCode
from attnplug.request.files import read_bytes, read_capped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RUNS: Final = re.compile(r"[-_.]+")
_VALID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
KINDS: Final = (".dist-info", ".egg-info")
"""How the names of folders with metadata end."""

_METADATA: Final = ("METADATA", "PKG-INFO")

# Far more than any real distribution has. What is larger costs other distributions their time.
_LARGEST: Final = {"entry_points.txt": 2**18}
_LARGEST_METADATA: Final = 4 * 2**20
LONGEST: Final = 255
"""Characters of a name or a version at most, as of a file's name."""

CORE: Final = "attnplug"
"""The distribution of core. Nothing that is found has its name, its version or its backend."""


def normalized(name: str) -> str:
    """Return the one spelling of a distribution's name, in which ``Flash_Attn`` is ``flash-attn`` (PEP 503)."""
    return _RUNS.sub("-", name).lower()


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
    def is_unnumbered(self) -> bool:
        """Whether neither has one, as where an installation was interrupted; the name of the folder mostly has."""
        return not (self._stem[1] or self.version)

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
    def _is_named_by_place(self) -> bool:
        return self.place.endswith(KINDS)

    @property
    def _header(self) -> Header:
        if not self._known:
            found = read_header(self._read)
            if self._is_named_by_place and found.name and normalized(found.name) != self.key:
                # Otherwise it could pass for another distribution, such as core.
                found = Header("", found.version, f"its metadata has the name of another distribution, {found.name!r}")
            self._known.append(found)
        return self._known[0]


@frozen
class Header:
    """
    What is read of a distribution's metadata.

    Attributes:
        name: Its name; empty if it is absent or too long.
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
        content = None  # whatever is wrong with it, other distributions are read
        with ForeignCode(f"its {file} cannot be read:") as code:
            content = read(file)
        problem = problem or code.problem
        if content is not None:
            head = content.decode("utf-8", "replace").replace("\r\n", "\n").partition("\n\n")[0]
            return _checked(dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", head, re.MULTILINE)), problem)
    return Header(problem=problem)


def _checked(found: Mapping[str, str], problem: str) -> Header:
    """Return a header without what is too long to be shown or compared."""
    long = [name for name, value in found.items() if len(value) > LONGEST]
    for name in long:
        problem = problem or f"its {name.lower()} has {len(found[name]):,} characters, and at most {LONGEST} are read"
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


def adapted(foreign: Any, source: str) -> Distribution:
    """Return a distribution of `importlib.metadata` as one of ours."""
    place = getattr(foreign, "_path", None)
    if hasattr(place, "joinpath"):  # a folder in an archive, or in an egg: read as carefully as every other folder
        read = partial(_read_member, place)
        header = read_header(read)
        stem, version = _split(str(getattr(place, "name", "")))
        name = header.name or stem or "(no name)"
        return Distribution(normalized(name), str(place), (name, header.version or version), read)
    name, version = str(foreign.metadata["Name"] or "(no name)"), str(foreign.version or "")
    return Distribution(normalized(name), str(place or source), (name, version), partial(_read_foreign, foreign))


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
