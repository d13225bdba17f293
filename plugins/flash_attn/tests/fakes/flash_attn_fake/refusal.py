"""How the fakes refuse: as the library does, and also where the library would return wrong numbers."""

from __future__ import annotations


class MisuseError(AssertionError):
    """A call that the library would accept, with wrong numbers or a fault on the device."""


def require(condition: object, message: str) -> None:
    """
    Refuse a call that breaks an unwritten rule.

    Raises:
        MisuseError: The condition does not hold.
    """
    if not condition:
        raise MisuseError(message)


def check(condition: object, message: str) -> None:
    """
    Refuse a call as the libraries in C++ do.

    Raises:
        RuntimeError: The condition does not hold.
    """
    if not condition:
        raise RuntimeError(message)
