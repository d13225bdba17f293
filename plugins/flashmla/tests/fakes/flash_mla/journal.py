"""The calls of the fake, for tests to read."""

from __future__ import annotations

from attrs import define, field, frozen


class MisuseError(AssertionError):
    """A call that the library would accept, with wrong numbers or a fault on the device."""


@frozen
class Call:
    """
    One call of the kernels.

    Attributes:
        requests: Requests.
        query_len: Rows of each.
        lens: The keys of each.
    """

    requests: int
    query_len: int
    lens: tuple[int, ...]


@define(eq=False)
class Journal:
    """
    The log of a process.

    Attributes:
        calls: The calls of the kernels.
        schedules: How many schedules were made.
        sparse: Query tokens, heads and entries of the calls of the sparse kernels.
    """

    calls: list[Call] = field(factory=list)
    schedules: int = 0
    sparse: list[tuple[int, int, int]] = field(factory=list)

    def clear(self) -> None:
        """Forget everything."""
        self.calls.clear()
        self.sparse.clear()
        self.schedules = 0


journal = Journal()
"""The journal of this process."""


def check(condition: object, message: str) -> None:
    """
    Refuse a call as the library does.

    Raises:
        RuntimeError: The condition does not hold.
    """
    if not condition:
        raise RuntimeError(message)


def require(condition: object, message: str) -> None:
    """
    Refuse a call that breaks an unwritten rule.

    Raises:
        MisuseError: The condition does not hold.
    """
    if not condition:
        raise MisuseError(message)
