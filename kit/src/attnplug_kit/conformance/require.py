"""The kit's assertion. It says what was demanded in words, and works where pytest rewrites nothing: when installed."""

from __future__ import annotations


def require(condition: object, message: str) -> None:
    """
    Demand that a condition holds.

    Raises:
        AssertionError: It does not; with the message.
    """
    if not condition:
        raise AssertionError(message)
