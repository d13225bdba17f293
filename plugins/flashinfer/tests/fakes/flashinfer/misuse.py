"""Refusals beyond the library's: calls whose result the library leaves undefined."""

from __future__ import annotations

from typing import Any


class MisuseError(AssertionError):
    """A call that the library accepts, with wrong results or a fault on the device."""


def require(condition: object, message: str) -> None:
    """
    Refuse a call that violates an undocumented rule.

    Raises:
        MisuseError: The condition does not hold.
    """
    if not condition:
        raise MisuseError(message)


def require_unused(**arguments: Any) -> None:
    """
    Refuse arguments that the fake does not model.

    Raises:
        MisuseError: One of them is not None, 0 or False.
    """
    for name, value in arguments.items():
        require(value is None or value is False or value == 0, f"{name}={value!r} is not modelled")
