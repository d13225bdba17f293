"""A measured time beside its budget."""

from __future__ import annotations

import statistics
from typing import Any, Final, Literal

from attrs import frozen

Unit = Literal["ms", "us"]

_PER_SECOND: Final = {"ms": 1e3, "us": 1e6}


@frozen
class Measurement:
    """
    One thing that was measured several times.

    Attributes:
        name: Its name, as ``attnplug bench NAME`` takes it; several measurements of one section share it.
        what: Exactly what was measured.
        samples: Seconds, in the order in which they were measured.
        unit: The unit to tell it in.
        budget: What it may take, in that unit; None where it is told for comparison alone.
    """

    name: str
    what: str
    samples: tuple[float, ...]
    unit: Unit
    budget: float | None = None

    @property
    def median(self) -> float:
        """The median in the unit, which is held against the budget."""
        return statistics.median(self.samples) * _PER_SECOND[self.unit]

    @property
    def best(self) -> float:
        """The best in the unit: what a machine without other work would come near."""
        return min(self.samples) * _PER_SECOND[self.unit]

    @property
    def within(self) -> bool:
        """Whether the median keeps the budget; what has none keeps it."""
        return self.budget is None or self.median <= self.budget

    @property
    def verdict(self) -> str:
        """The same in a word."""
        return "" if self.budget is None else "within" if self.within else "over"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "median": round(self.median, 4),
            "best": round(self.best, 4),
            "budget": self.budget,
            "verdict": self.verdict,
            "samples": len(self.samples),
        }


def told(value: float, unit: Unit) -> str:
    """Return a time with three digits: ``0.123 us``, ``12.3 ms``, ``123 ms``."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
