"""Reads decisions of another process: every value has the type that `to_dict` writes, or the decision is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from attnplug.errors import DecisionError, shown
from attnplug.request.fields import FIELDS
from attnplug.request.tables import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable


def check_received(what: str, data: object, checks: Mapping[str, Callable[[Any], bool]]) -> None:
    """
    Check a table of a decision.

    Args:
        what: What the table describes, for the message.
        data: The table.
        checks: For each key what holds for its value. There are no other keys.

    Raises:
        DecisionError: It is no table, lacks a key, has another one, or a value is not what it should be.
    """
    if not isinstance(data, Mapping) or set(data) != set(checks):
        raise no_decision(data)
    for name, is_valid in checks.items():
        if not is_valid(data[name]):
            refuse_received(f"{name}={shown(data[name])} of {what}")


def refuse_received(found: str) -> NoReturn:
    """Raise for a part of a decision that `to_dict` cannot have written."""
    raise DecisionError(f"a decision with {found} was received", _EXPECTED, _FIX)


def no_decision(data: object) -> DecisionError:
    """Return the error for data that `to_dict` has not written."""
    return DecisionError(f"{shown(data)} was received", _EXPECTED, _FIX)


_EXPECTED = "a decision is what Selection.to_dict or Plan.to_dict returned, whole and unchanged"
_FIX = "send it as JSON from the process that decided; both sides need the same version of attnplug"


def is_text(value: object) -> bool:
    """Whether a value is a text."""
    return type(value) is str


def is_name(value: object) -> bool:
    """Whether a value is a text that is not empty."""
    return type(value) is str and bool(value)


def is_table(value: object) -> bool:
    """Whether a value is a table with names as keys."""
    return isinstance(value, Mapping) and all(map(is_text, value))


def is_table_or_none(value: object) -> bool:
    """Whether a value is such a table, or None."""
    return value is None or is_table(value)


def are_texts(value: object) -> bool:
    """Whether a value is a table of texts."""
    return isinstance(value, Mapping) and is_table(value) and all(map(is_text, value.values()))


def are_options(value: object) -> bool:
    """Whether a value is a table of values that an option can have."""
    return (
        isinstance(value, Mapping)
        and is_table(value)
        and all(type(item) is float or is_plain(item) for item in value.values())
    )


def is_flag(value: object) -> bool:
    """Whether a value is true or false."""
    return type(value) is bool


def is_list(value: object) -> bool:
    """Whether a value is a list."""
    return isinstance(value, (list, tuple))


def is_list_or_none(value: object) -> bool:
    """Whether a value is a list, or None."""
    return value is None or is_list(value)


def is_list_of_texts(value: object) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, (list, tuple)) and all(map(is_text, value))


def is_value_of(name: str, *, optional: bool = False) -> Callable[[Any], bool]:
    """Return whether a value is a canonical one of a field, or None where that is one too."""

    def is_valid(value: object) -> bool:
        if value is None:
            return optional
        try:
            return bool(FIELDS[name].domain.canonical(value) == value)
        except ValueError:
            return False

    return is_valid


def one_of(*values: str) -> Callable[[Any], bool]:
    """Return whether a value is one of these texts."""
    return lambda value: type(value) is str and value in values


def is_wanted(value: object) -> bool:
    """Whether a value is what a reason reports as requested: plain values, in lists and tables."""
    try:
        return _is_wanted(value)
    except RecursionError:
        return False


def _is_wanted(value: object) -> bool:
    if isinstance(value, Mapping):
        return is_table(value) and all(map(_is_wanted, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_wanted, value))
    return value is None or is_plain(value)
