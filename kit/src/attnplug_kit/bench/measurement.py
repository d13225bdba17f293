"""A measured time beside its budget."""

from __future__ import annotations

import statistics
from typing import Any, Final, Literal

from attrs import frozen

Unit = Literal["ms", "us", "x"]

_PER_SECOND: Final = {"ms": 1e3, "us": 1e6, "x": 1.0}


@frozen
class Measurement:
    """
    One thing that was measured several times.

    Attributes:
        name: Its name, as ``attnplug bench NAME`` takes it; several measurements of one section share it.
        what: Exactly what was measured.
        samples: Seconds, in the order in which they were measured; numbers where the unit is ``"x"``, times as many.
        unit: The unit to tell it in.
        budget: What it may take, in that unit; None where it is told for comparison alone.
        paired: Whether each sample compares two of one round: their best is luck, and not told.
        decides: Whether its budget decides the exit code: that of attnplug's own part does, what a backend takes
            besides is told.
    """

    name: str
    what: str
    samples: tuple[float, ...]
    unit: Unit
    budget: float | None = None
    paired: bool = False
    decides: bool = True

    @property
    def median(self) -> float:
        """The median in the unit, which is held against the budget."""
        return statistics.median(self.samples) * _PER_SECOND[self.unit]

    @property
    def best(self) -> float | None:
        """The best in the unit: what a machine without other work would come near. None where it says nothing."""
        return None if self.paired else min(self.samples) * _PER_SECOND[self.unit]

    @property
    def quartiles(self) -> tuple[float, float]:
        """What a quarter of the samples lies below, and a quarter above, in the unit."""
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low * _PER_SECOND[self.unit], high * _PER_SECOND[self.unit]

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
            "quartiles": [round(quartile, 4) for quartile in self.quartiles],
            "best": None if self.best is None else round(self.best, 4),
            "budget": self.budget,
            "verdict": self.verdict,
            "decides": self.decides and self.budget is not None,
            "samples": len(self.samples),
        }


def told(value: float, unit: Unit) -> str:
    """Return a number with three digits: ``0.123 us``, ``12.3 ms``, ``123 ms``, ``1.23 x``."""
    return f"{_digits(value)} {unit}"


def told_range(low: float, high: float, unit: Unit) -> str:
    """Return two of them: ``12.3 to 12.9 ms``."""
    return f"{_digits(low)} to {_digits(high)} {unit}"


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"
