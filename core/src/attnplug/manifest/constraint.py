"""
The values that a field may have: ordered alternatives, each one value or a range.

Written in TOML as ``64``, ``{ multiple_of = 8, max = 256 }`` or an ordered list of those. One meaning everywhere:
membership, intersection and the nearest allowed value are defined here and nowhere else.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug.request.domains import Domain, Integer, Names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@frozen
class Exact:
    """One value."""

    value: Any

    def __str__(self) -> str:
        return str(self.value)


@frozen
class Range:
    """
    Values from `min` to `max`, both included; of integers, only multiples of `multiple_of`. None is no bound.
    """

    min: Any = None
    max: Any = None
    multiple_of: int | None = None

    def __str__(self) -> str:
        if self.multiple_of is not None:
            tail = [f"from {self.min}"] * (self.min is not None) + [f"up to {self.max}"] * (self.max is not None)
            return " ".join([f"multiples of {self.multiple_of}", *tail])
        if self.min is None and self.max is None:
            return "any"
        if self.min is None or self.max is None:
            return f">= {self.min}" if self.max is None else f"<= {self.max}"
        return f"{self.min} to {self.max}"


Alternative = Exact | Range


@frozen
class Constraint:
    """
    An ordered union of alternatives in one domain. Without alternatives nothing is allowed.

    Attributes:
        domain: What the values are.
        alternatives: Exact values and ranges, most preferred first.
    """

    domain: Domain
    alternatives: tuple[Alternative, ...]

    def allows(self, value: Any) -> bool:
        """Whether `value` (canonical) is a member."""
        if isinstance(self.domain, Names):
            listed = {
                name
                for alternative in self.alternatives
                if isinstance(alternative, Exact)
                for name in alternative.value
            }
            return set(value) <= listed
        return any(_admits(self.domain, alternative, value) for alternative in self.alternatives)

    def intersect(self, other: Constraint) -> Constraint:
        """Return what both allow, in this constraint's order of preference."""
        if isinstance(self.domain, Names):
            return Constraint(
                self.domain, tuple(a for a in self.alternatives if isinstance(a, Exact) and other.allows(a.value))
            )
        met = [_meet(self.domain, ours, theirs) for ours in self.alternatives for theirs in other.alternatives]
        return Constraint(
            self.domain, tuple(dict.fromkeys(alternative for alternative in met if alternative is not None))
        )

    def first(self) -> Any:
        """Return the first of `choices`, or None where there is none."""
        return next((value for a in self.alternatives if (value := _lowest(self.domain, a)) is not None), None)

    def choices(self) -> tuple[Any, ...]:
        """
        Return one value of each alternative, most preferred first.

        Of a range it is the smallest; the largest where only that is known; where it has no bounds at all, the domain's
        example. An empty alternative has none, nor has a range without bounds over open names.
        """
        return tuple(dict.fromkeys(value for a in self.alternatives if (value := _lowest(self.domain, a)) is not None))

    def members(self, limit: int = 1024) -> tuple[Any, ...]:
        """Return the allowed values, preferred ones first, then rising; of whole numbers only those up to `limit`."""
        if not isinstance(self.domain, Integer):
            return self.choices()
        rising = sorted({value for a in self.alternatives for value in _up_to(limit, self.domain, a)})
        return tuple(dict.fromkeys((*self.choices(), *rising)))

    def restrict(self, passes: Callable[[int], bool], limit: int = 1024) -> Constraint:
        """
        Return the whole numbers that pass, in the same order of preference.

        Args:
            passes: Decides one.
            limit: The largest number of a range that is tried.
        """
        found: list[Alternative] = []
        for alternative in self.alternatives:
            if isinstance(alternative, Exact):
                found += [alternative] if passes(alternative.value) else []
            else:
                found += _runs(Constraint(self.domain, (alternative,)).members(limit), alternative, passes)
        return Constraint(self.domain, tuple(dict.fromkeys(found)))

    def nearest(self, value: Any) -> Any:
        """
        Return the allowed value nearest to `value`, or None where nothing is allowed.

        Where values have an order, nearest is by distance, and the smaller of two; elsewhere it is the most
        preferred value.
        """
        if isinstance(self.domain, Names):
            return tuple(name for name in value if self.allows((name,))) or self.first()
        if self.allows(value):
            return value
        near = [found for a in self.alternatives for found in _around(self.domain, a, value)]
        return min(near, key=lambda found: _distance(self.domain, found, value), default=None)

    def dump(self) -> list[Any]:
        """Return the alternatives as JSON carries them, and as a manifest writes them."""
        return [_dump(self.domain, alternative) for alternative in self.alternatives]

    def __str__(self) -> str:
        texts = [
            ", ".join(map(str, a.value)) if isinstance(a, Exact) and isinstance(a.value, tuple) else str(a)
            for a in self.alternatives
        ]
        return ", ".join(texts) if texts else "nothing"


def _dump(domain: Domain, alternative: Alternative) -> Any:
    if isinstance(alternative, Exact):
        return domain.dump(alternative.value)
    bounds = {"min": alternative.min, "max": alternative.max}
    dumped = {name: domain.dump(bound) for name, bound in bounds.items() if bound is not None}
    return dumped if alternative.multiple_of is None else {**dumped, "multiple_of": alternative.multiple_of}


def _admits(domain: Domain, alternative: Alternative, value: Any) -> bool:
    if isinstance(alternative, Exact):
        return domain.allows(alternative.value, value)
    rank = domain.rank(value)
    low = alternative.min is None or domain.rank(alternative.min) <= rank
    high = alternative.max is None or rank <= domain.rank(alternative.max)
    return low and high and (alternative.multiple_of is None or value % alternative.multiple_of == 0)


def _meet(domain: Domain, ours: Alternative, theirs: Alternative) -> Alternative | None:
    """Return the values in both alternatives as one alternative, or None."""
    if isinstance(ours, Exact) and isinstance(theirs, Exact):
        # The narrower of the two: a family ("10.0f") meets one of its members in the member.
        if domain.allows(theirs.value, ours.value):
            return ours
        return theirs if domain.allows(ours.value, theirs.value) else None
    if isinstance(ours, Exact):
        return _meet_exact(domain, ours, theirs)
    if isinstance(theirs, Exact):
        return _meet_exact(domain, theirs, ours)
    # Two ranges meet in a range: the narrower bounds, and multiples of both steps.
    multiples = [m for m in (ours.multiple_of, theirs.multiple_of) if m is not None]
    met = Range(
        max((b for b in (ours.min, theirs.min) if b is not None), key=domain.rank, default=None),
        min((b for b in (ours.max, theirs.max) if b is not None), key=domain.rank, default=None),
        lcm(*multiples) if multiples else None,
    )
    return met if met == Range() or _lowest(domain, met) is not None else None


def _meet_exact(domain: Domain, exact: Exact, other: Alternative) -> Alternative | None:
    family = domain.span(exact.value)
    if family is not None:
        return _meet(domain, Range(*family), other)
    return exact if _admits(domain, other, exact.value) else None


def _lowest(domain: Domain, alternative: Alternative) -> Any:
    """
    Return the smallest value of an alternative (the largest where it has no lower bound and its domain none either,
    the domain's example where it has no bound at all), or None if there is none.
    """
    if isinstance(alternative, Exact):
        return alternative.value
    if isinstance(domain, Integer):
        low = max(domain.min, alternative.min if alternative.min is not None else domain.min)
        value: Any = _up(low, alternative.multiple_of or 1)
    else:
        bounds = (alternative.min, alternative.max, domain.example())
        value = next((bound for bound in bounds if bound is not None), None)
    return value if value is not None and _admits(domain, alternative, value) else None


def _up_to(limit: int, domain: Integer, alternative: Alternative) -> Sequence[int]:
    """Return the whole numbers of an alternative, up to a limit."""
    if isinstance(alternative, Exact):
        return (alternative.value,) if alternative.value <= limit else ()
    step = alternative.multiple_of or 1
    low = max(domain.min, alternative.min if alternative.min is not None else domain.min)
    high = limit if alternative.max is None else min(limit, alternative.max)
    return range(_up(low, step), high + 1, step)


def _runs(numbers: Sequence[int], alternative: Range, passes: Callable[[int], bool]) -> Iterator[Alternative]:
    """Yield runs of neighboring numbers of a range that pass: three or more as a range again."""
    run: list[int] = []
    for number in (*numbers, None):
        if number is not None and passes(number):
            run.append(number)
            continue
        if len(run) > 2:
            yield Range(run[0], run[-1], alternative.multiple_of)
        else:
            yield from map(Exact, run)
        run = []


def _around(domain: Domain, alternative: Alternative, value: Any) -> list[Any]:
    """Return the members of an alternative that can be nearest to `value`, which is not a member."""
    if isinstance(alternative, Exact):
        return [alternative.value]
    found = [bound for bound in (alternative.min, alternative.max) if bound is not None]
    if isinstance(domain, Integer):
        # The multiples beside the value, and the first and the last one of the range: some of them may be outside it.
        step = alternative.multiple_of or 1
        low = max(domain.min, alternative.min or domain.min)
        high = alternative.max if alternative.max is not None else max(value, low) + step
        clamped = min(max(value, low), high)
        found = [clamped // step * step, _up(clamped, step), _up(low, step), high // step * step]
    return [
        candidate for candidate in found if _admits(domain, alternative, candidate) and _in_domain(domain, candidate)
    ]


def _in_domain(domain: Domain, value: Any) -> bool:
    return not isinstance(domain, Integer) or value >= domain.min


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _distance(domain: Domain, found: Any, value: Any) -> Any:
    """
    Order found values by their distance from `value`; the smaller of two equally near ones first. Without an order
    all are equally near.
    """
    here, there = domain.rank(found), domain.rank(value)
    if here is None:
        return (0, 0)
    if isinstance(here, tuple):  # compute capabilities: a whole family apart is further than any number of minor steps
        return (abs(here[0] - there[0]), abs(here[1] - there[1])), here
    return abs(here - there), here
