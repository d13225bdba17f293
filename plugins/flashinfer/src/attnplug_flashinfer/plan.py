"""What a build leaves for the forwards of one plan key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug_flashinfer.wrappers import WrapperLease


@frozen(eq=False)
class Part:
    """
    Query rows that one planned wrapper attends.

    Attributes:
        run: The wrapper's `run`.
        first: The first row.
        last: The row behind the last one.
        lease: What keeps the wrapper from being planned anew; a graph's wrapper belongs to its slot.
    """

    run: Callable[..., Any]
    first: int
    last: int
    lease: WrapperLease | None = None


@frozen(eq=False)
class Plan:
    """
    The planned wrappers of a step.

    Attributes:
        parts: All rows of the step, each in one part.
        prefix: The same rows, over the keys that all requests share; the parts then have the others.
    """

    parts: tuple[Part, ...]
    prefix: Part | None = None
