"""Lists of names in settings; and what an allow or block list may hold: names, some with versions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from attnplug.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attrs import Attribute

_NAME = r"[^\s<>=!~;@()\[\],/'\"-][^\s<>=!~;@()\[\],/'\"]*"
_ENTRY = re.compile(rf"{_NAME}(?:/{_NAME})?")
_BOUNDED = re.compile(rf"({_NAME})\s*([<>=!~].*)")


def split_version(entry: str) -> tuple[str, str]:
    """Split an entry of an allow or block list into a name and the bounds of its version, which may be empty."""
    bounded = _BOUNDED.fullmatch(entry)
    return (bounded[1], bounded[2]) if bounded else (entry, "")


def _could_match(entry: str) -> bool:
    """Whether an entry of an allow or block list has a form that may mean something."""
    bounds = split_version(entry)[1]
    if not bounds:
        return _ENTRY.fullmatch(entry) is not None
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - few lists have versions

    try:
        SpecifierSet(bounds).contains("0")
    except ValueError:  # also of a number that has too many digits
        return False
    return True


def check_entries(entries: Iterable[str], place: str) -> None:
    """
    Check the entries of an allow or block list.

    Raises:
        SettingsError: One could never match.
    """
    for entry in sorted(entries):
        if not _could_match(entry):
            raise SettingsError(
                f"the entry {entry!r} is in {place}, and could never match",
                "an entry is a backend, a backend/variant or a distribution; all but a variant may have a version, as "
                "in 'name==1.0'",
                "correct or remove the entry",
            )


def validate_entries(settings: object, attribute: Attribute[Any], entries: Any) -> None:
    """Check a setting of the `Settings` class, as attrs calls it."""
    del settings
    check_entries(entries or (), f"the setting {attribute.name}")


def parse_names(text: str, name: str) -> tuple[str, ...]:
    """
    Read a list of names, separated by commas. An empty text is an empty list.

    Raises:
        SettingsError: A name is empty.
    """
    names = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if not all(names):
        raise SettingsError(
            f"{name}={text!r} is set", "it is a list of names, separated by commas", "remove the empty names"
        )
    return names


def parse_entries(text: str, name: str) -> frozenset[str]:
    """
    Read an allow or block list, separated by commas. A comma between two bounds of a version does not separate.

    Raises:
        SettingsError: An entry is empty, or could never match.
    """
    entries: list[str] = []
    for part in parse_names(text, name):
        if entries and part[0] in "<>=!~" and split_version(entries[-1])[1]:
            entries[-1] += f",{part}"
        else:
            entries.append(part)
    check_entries(entries, name)
    return frozenset(entries)
