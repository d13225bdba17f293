"""Reads decisions of another process: every value has the type that `to_dict` writes, or the decision is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from attnplug.errors import DecisionError, shown
from attnplug.request.fields import FIELDS
from attnplug.request.tables import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[Any], bool]


def check_received(what: str, data: object, checks: Mapping[str, Check]) -> None:
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


def is_flag(value: object) -> bool:
    """Whether a value is true or false."""
    return type(value) is bool


def is_option(value: object) -> bool:
    """Whether a value is one that an option can have."""
    return type(value) is float or is_plain(value)


def is_list(value: object) -> bool:
    """Whether a value is a list."""
    return isinstance(value, (list, tuple))


def is_table(value: object) -> bool:
    """Whether a value is a table with names as keys."""
    return isinstance(value, Mapping) and all(map(is_text, value))


def list_of(check: Check) -> Check:
    """Return whether a value is a list of such values."""
    return lambda value: is_list(value) and all(map(check, value))


def table_of(check: Check) -> Check:
    """Return whether a value is a table of such values."""
    return lambda value: is_table(value) and all(map(check, value.values()))


def optional(check: Check) -> Check:
    """Return whether a value is such a value, or None."""
    return lambda value: value is None or check(value)


def one_of(*values: str) -> Check:
    """Return whether a value is one of these texts."""
    return lambda value: type(value) is str and value in values


def is_value_of(name: str) -> Check:
    """Return whether a value is a canonical value of a field."""

    def is_valid(value: object) -> bool:
        try:
            return bool(FIELDS[name].domain.canonical(value) == value)
        except ValueError:
            return False

    return is_valid


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
