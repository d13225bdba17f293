"""
The line of a key in a TOML file, for error messages.

TOML parsers keep no positions. This scan may be approximate: it finds the line of the deepest part of the key path that
is written out. A text is scanned once, since every rule of a manifest has a line.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KEY = re.compile(r"^\s*((?:[A-Za-z0-9_-]+|\"[^\"]+\")(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]+\"))*)\s*=")
_PART = re.compile(r'"([^"]*)"|([^\s."]+)')

Place = tuple["str | int", ...]


def locate(text: str, path: Sequence[str | int]) -> int | None:
    """
    Return the line, counted from 1, of the key at `path`; indices in the path count the tables of an array.

    Returns None where not even the first part is found.
    """
    place, (lines, tables) = tuple(path), _scan(text)
    exact = lines.get(place, tables.get(place))  # a table may be written with its sub-tables only
    if exact is not None:
        return exact
    depth = next((depth for depth in range(len(place) - 1, 0, -1) if place[:depth] in lines), 0)
    return _inside(text, lines[place[:depth]], place[depth:]) if depth else None


@lru_cache(maxsize=2)
def _scan(text: str) -> tuple[Mapping[Place, int], Mapping[Place, int]]:
    """Return the first line of every key path that is written out, and of every beginning of one."""
    # A key path is written out by a table's header, or by a key at the start of a line.
    lines: dict[Place, int] = {}
    tables: dict[Place, int] = {}
    for number, path in _keys(text):
        lines.setdefault(path, number)
        for depth in range(1, len(path)):
            tables.setdefault(path[:depth], number)
    return lines, tables


def _keys(text: str) -> Iterator[tuple[int, Place]]:
    """Yield (line, key path) of every table header and every key at the start of a line."""
    table: Place = ()
    counts: dict[Place, int] = {}
    for number, line in enumerate(_lines(text), 1):
        if header := _header(line):
            opening, name = header[0], _split(header[1])
            if opening == "[[":
                index = counts[name] = counts.get(name, -1) + 1
                table = (*name, index)
            else:
                table = name
            yield number, table
        elif key := _KEY.match(line):
            yield number, table + _split(key[1])


@lru_cache(maxsize=2)
def _lines(text: str) -> Sequence[str]:
    return text.splitlines()


def _header(line: str) -> tuple[str, str] | None:
    """
    Return the opening bracket and the name of a table's header, or None where a line is something else.

    By hand, each step once over the line: a regular expression tries every division of a run of blanks.
    """
    text = line.strip()
    if not text.startswith("["):
        return None
    opening = "[[" if text.startswith("[[") else "["
    name, closing, rest = text[len(opening) :].partition("]")
    rest = rest[1:].lstrip() if rest.startswith("]") else rest.lstrip()
    if not closing or not name.strip() or "[" in name or "#" in name or (rest and not rest.startswith("#")):
        return None
    return opening, name


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(quoted or bare for quoted, bare in _PART.findall(dotted))


def _inside(text: str, line: int, rest: Place) -> int:
    """Follow the remaining names into an inline value that may span lines; stop at the next key or header."""
    lines = _lines(text)
    for name in rest:
        if not isinstance(name, str):
            continue  # which item of an inline array it is, its line does not show
        pattern = re.compile(rf"\b{re.escape(name)}\b")
        for number in range(line, len(lines) + 1):
            if number > line and (
                _header(lines[number - 1]) or (_KEY.match(lines[number - 1]) and "{" not in lines[number - 2])
            ):
                break
            if pattern.search(lines[number - 1]):
                line = number
                break
    return line
