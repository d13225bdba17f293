"""Tables of plain values that hash, what makes any plain value hash, and tables that are only read."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from attnplug.errors import shown


class FrozenTable(tuple[tuple[str, Any], ...]):
    """
    A table of plain values as sorted pairs, which hashes. ``dict(table)`` is the table again.

    Unlike in Python, 1, True and 1.0 differ in it: a kernel that branches on the type of a parameter does other things.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            return len(other) == len(self) and all(
                name in other and _typed(item) == _typed(other[name]) for name, item in self
            )
        return _typed(self) == _typed(other) if isinstance(other, tuple) else NotImplemented

    def __ne__(self, other: object) -> bool:  # the tuple's own compares otherwise
        return not self == other

    __hash__ = tuple.__hash__  # that of the plain tuples which equal it

    def __repr__(self) -> str:
        return repr(dict(self))


def _typed(value: Any) -> Any:
    """Return a value with the types of all that is in it, for comparisons."""
    return tuple(map(_typed, value)) if isinstance(value, tuple) else (type(value), value)


def is_entry(pair: object) -> bool:
    """Whether a value is a name with a plain value."""
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and type(pair[0]) is str and is_plain(pair[1])


def is_plain(value: object) -> bool:
    """Whether a value is a boolean, a text, a finite number: what JSON carries, and every process reads alike."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) in (bool, str) or (type(value) is float and isfinite(value))


def freeze(value: Any) -> Any:
    """Return a value as one that hashes: lists as tuples, tables as `FrozenTable`, what is left as its text."""
    try:
        return _freeze(value)
    except RecursionError:
        return shown(value)


def _freeze(value: Any) -> Any:
    if isinstance(value, FrozenTable):
        return value
    if isinstance(value, Mapping):
        return FrozenTable(sorted((str(name), _freeze(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_freeze, value))
    try:
        hash(value)
    except TypeError:
        return shown(value)
    return value


def thaw(value: Any) -> Any:
    """Return what `freeze` returned as JSON carries it, tables as dictionaries."""
    if isinstance(value, FrozenTable):
        return {name: thaw(item) for name, item in value}
    return [thaw(item) for item in value] if isinstance(value, tuple) else value


class _ReadOnly(dict[str, Any]):
    """A table that refuses changes. Unlike a mapping proxy it can be copied and pickled."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("this table is only read: copy it with dict(...) to change the copy")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def read_only(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy that only reads, and that copies and pickles."""
    return _ReadOnly(mapping)
