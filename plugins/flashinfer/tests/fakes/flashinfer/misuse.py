"""What the fake refuses beyond the library: calls whose result the library leaves undefined."""

from __future__ import annotations

from typing import Any


class MisuseError(AssertionError):
    """A call that the library would take, and answer with wrong numbers or a fault on the device."""


def require(condition: object, message: str) -> None:
    """
    Refuse a call that breaks an unwritten rule.

    Raises:
        MisuseError: The condition does not hold.
    """
    if not condition:
        raise MisuseError(message)


def require_unused(**arguments: Any) -> None:
    """
    Refuse arguments that the fake does not model.

    Raises:
        MisuseError: One of them is neither None, 0 nor False.
    """
    for name, value in arguments.items():
        require(value is None or value is False or value == 0, f"the fake does not know what {name}={value!r} does")
