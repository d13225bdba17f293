"""The calls of the fakes, for tests to read."""

from __future__ import annotations

from typing import Any

from attrs import define, field, frozen
from torch import Tensor


@frozen
class Call:
    """
    One call that was not refused.

    Attributes:
        library: ``"fa2"``, ``"fa2_vllm"``, ``"fa3"``, ``"fa3_vllm"``, ``"fa3_tokenspeed"``, ``"fa4"`` or ``"torch"``.
        function: Its name.
        num_positional: Arguments by position.
        keywords: The names of the others.
        arguments: Values by name; of tensors, their shapes: they would live as long as the journal.
    """

    library: str
    function: str
    num_positional: int
    keywords: tuple[str, ...]
    arguments: dict[str, Any] = field(eq=False, repr=False)


@define(eq=False)
class Journal:
    """The log of a process."""

    calls: list[Call] = field(factory=list)

    def clear(self) -> None:
        """Forget everything."""
        self.calls.clear()

    def record(self, library: str, function: str, num_positional: int, given: dict[str, Any], keywords: Any) -> None:
        """Write a call down."""
        plain = {name: tuple(value.shape) if isinstance(value, Tensor) else value for name, value in given.items()}
        self.calls.append(Call(library, function, num_positional, tuple(keywords), plain))

    def of(self, function: str) -> list[Call]:
        """Return the calls of a function."""
        return [call for call in self.calls if call.function == function]


journal = Journal()
"""The journal of this process."""
