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
    from collections.abc import Sequence

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]#]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*((?:[A-Za-z0-9_-]+|\"[^\"]+\")(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]+\"))*)\s*=")
_PART = re.compile(r'"([^"]*)"|([^\s."]+)')


def locate(text: str, path: Sequence[str | int]) -> int | None:
    """
    Return the line, counted from 1, of the key at `path`; indices in the path count the tables of an array.

    Returns None where not even the first part is found.
    """
    exact = _lines(text).get(tuple(path))
    if exact is not None:
        return exact
    best: tuple[int, int] | None = None
    for line, prefix in _keys(text):
        depth = _shared(prefix, path)
        whole = depth == len(prefix) or depth == len(path)  # a table may be written with its sub-tables only
        if depth and whole and (best is None or depth > best[0]):
            best = (depth, line)
    if best is None:
        return None
    return _inside(text, best[1], path[best[0] :])


@lru_cache(maxsize=2)
def _keys(text: str) -> list[tuple[int, tuple[str | int, ...]]]:
    """List (line, key path) of every table header and every key at the start of a line."""
    found: list[tuple[int, tuple[str | int, ...]]] = []
    table: tuple[str | int, ...] = ()
    counts: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            name = _split(header[2])
            if header[1] == "[[":
                index = counts[name] = counts.get(name, -1) + 1
                table = (*name, index)
            else:
                table = name
            found.append((number, table))
        elif key := _KEY.match(line):
            found.append((number, table + _split(key[1])))
    return found


@lru_cache(maxsize=2)
def _lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Return the first line of every key path that is written out."""
    return {path: line for line, path in reversed(_keys(text))}


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(quoted or bare for quoted, bare in _PART.findall(dotted))


def _shared(prefix: Sequence[str | int], path: Sequence[str | int]) -> int:
    depth = 0
    for ours, theirs in zip(prefix, path, strict=False):
        if ours != theirs:
            break
        depth += 1
    return depth


def _inside(text: str, line: int, rest: Sequence[str | int]) -> int:
    """Follow the remaining names into an inline value that may span lines; stop at the next key or header."""
    lines = text.splitlines()
    for name in rest:
        pattern = re.compile(rf"\b{re.escape(str(name))}\b")
        for number in range(line, len(lines) + 1):
            if number > line and (
                _HEADER.match(lines[number - 1]) or (_KEY.match(lines[number - 1]) and "{" not in lines[number - 2])
            ):
                break
            if isinstance(name, str) and pattern.search(lines[number - 1]):
                line = number
                break
    return line
