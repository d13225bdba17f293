"""An installed distribution, as far as its metadata files tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from attrs import field, frozen

_RUNS: Final = re.compile(r"[-_.]+")
_VALID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_METADATA: Final = ("METADATA", "PKG-INFO")


def normalized(name: str) -> str:
    """Return the one spelling of a distribution's name, in which ``Flash_Attn`` is ``flash-attn`` (PEP 503)."""
    return _RUNS.sub("-", name).lower()


@frozen(eq=False)
class Distribution:
    """
    A distribution; its files are read when they are asked for.

    Attributes:
        key: Its normalised name.
        place: Where its metadata lies, for messages.
    """

    key: str
    place: str
    _stem: tuple[str, str]
    _read: Callable[[str], bytes | None]
    _header: dict[str, str] = field(factory=dict, init=False)

    @classmethod
    def of(cls, folder: str, name: str) -> Distribution | None:
        """
        Return the distribution of one name in a folder on ``sys.path``.

        Returns:
            None where the name is that of something else, such as what an interrupted uninstallation leaves behind
            (``~orch-2.0.dist-info``).
        """
        stem, place = _split(name), f"{folder}/{name}"
        valid = _VALID.fullmatch(stem[0]) is not None
        return cls(normalized(stem[0]), place, stem, partial(_read_file, place)) if valid else None

    @property
    def name(self) -> str:
        """Its name as its author writes it."""
        return self._field("Name") or self._stem[0]

    @property
    def version(self) -> str:
        """Its version; empty where neither its metadata nor the name of its folder tells."""
        return self._field("Version") or self._stem[1]

    def entry_points(self) -> str | None:
        """
        Return the text of its entry points, or None where it has none.

        Raises:
            OSError: The file cannot be read.
            UnicodeDecodeError: It is not UTF-8.
        """
        content = self._read("entry_points.txt")
        return None if content is None else content.decode("utf-8")

    def _field(self, name: str) -> str:
        if not self._header:
            self._header.update({"": "read", **self._read_header()})
        return self._header.get(name, "")

    def _read_header(self) -> dict[str, str]:
        """Read Name and Version. A neighbour whose metadata is damaged is still known by the name of its folder."""
        for file in _METADATA:
            try:
                content = self._read(file)
            except OSError:
                continue
            if content is not None:
                head = content.decode("utf-8", "replace").replace("\r\n", "\n").partition("\n\n")[0]
                return dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", head, re.MULTILINE))
        return {}


def _read_file(place: str, file: str) -> bytes | None:
    """Read a file of a metadata folder, or the metadata that stands alone (distutils)."""
    try:
        # A Path for each of some hundred files would cost more than reading them.
        with open(f"{place}/{file}", "rb") as stream:  # noqa: PTH123
            return stream.read()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return Path(place).read_bytes() if file == "PKG-INFO" else None


def _split(name: str) -> tuple[str, str]:
    """Split ``name-version.dist-info`` and ``name-version-py3.11.egg-info``; either may lack its version."""
    stem, _, kind = name.rpartition(".")
    if kind == "dist-info":
        head, dash, version = stem.rpartition("-")
        return (head, version) if dash else (stem, "")
    head, _, rest = stem.partition("-")
    return head, rest.partition("-")[0]
