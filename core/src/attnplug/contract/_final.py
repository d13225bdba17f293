"""`typing.final`, with a mark that can be read at run time on every supported Python (its own came with 3.11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

_T = TypeVar("_T")

if TYPE_CHECKING:
    from typing import final
else:

    def final(method: _T) -> _T:
        """Mark a method, or the getter of a property, as one that no subclass replaces."""
        method.__final__ = True
        return method


__all__ = ["final"]
