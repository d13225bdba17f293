"""
The kinds of value that a field can have.

A domain turns what a user or a manifest wrote into the one canonical value that is compared, and says how values are
ordered and described.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from attnplug.request.capability import HARDWARE, ComputeCapability, parse_capability

_OPEN_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


@frozen(kw_only=True)
class Domain(ABC):
    """
    A set of values.

    Attributes:
        text: What a value is, as error messages say it.
    """

    text: str

    @abstractmethod
    def canonical(self, value: Any) -> Any:
        """
        Return the one value that `value` means.

        Raises:
            ValueError: `value` is not of this domain.
        """

    def rank(self, value: Any) -> Any:
        """Return what ranges compare, or None where values have no order."""
        del value
        return None

    def allows(self, allowed: Any, value: Any) -> bool:
        """Whether a value that a manifest lists admits the asked `value`."""
        return bool(allowed == value)

    def span(self, allowed: Any) -> tuple[Any, Any] | None:
        """Return the lowest and the highest value that a listed value admits, where it admits more than itself."""
        del allowed
        return None

    def example(self) -> Any:
        """
        Return a value for a range without bounds, or None where no value is better known than others: of names and
        texts that anybody may add to.
        """
        return None

    def dump(self, value: Any) -> Any:
        """Return `value` as JSON can carry it; `canonical` reads it back."""
        return value

    def refuse(self) -> ValueError:
        """Return the error that says what this domain holds."""
        return ValueError(self.text)


@frozen(kw_only=True)
class Flag(Domain):
    """True or false."""

    text: str = "true or false"

    def canonical(self, value: Any) -> bool:
        """Return the value itself, if it is one of this domain."""
        if type(value) is not bool:
            raise self.refuse()
        return value


@frozen(kw_only=True)
class Integer(Domain):
    """Whole numbers from `min` on."""

    min: int = 1
    text: str = field()

    @text.default
    def _describe(self) -> str:
        return f"a whole number from {self.min} on"

    def canonical(self, value: Any) -> int:
        """Return the value itself, if it is one of this domain."""
        if type(value) is not int or value < self.min:
            raise self.refuse()
        return value

    def rank(self, value: Any) -> int:
        """Return the place in the order."""
        return int(value)

    def example(self) -> int:
        """Return the smallest one."""
        return self.min


@frozen(kw_only=True)
class Number(Domain):
    """Positive finite numbers."""

    text: str = "a positive finite number"

    def canonical(self, value: Any) -> float:
        """Return the value itself, if it is one of this domain."""
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.refuse()
        return float(value)

    def rank(self, value: Any) -> float:
        """Return the place in the order."""
        return float(value)

    def example(self) -> float:
        """Return 1: there is no smallest positive number."""
        return 1.0


@frozen(kw_only=True)
class Name(Domain):
    """
    One name of a list.

    Attributes:
        values: The names, canonical.
        aliases: Other spellings.
        open: Whether a dotted name (``vendor.name``) is a value too.
    """

    values: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(factory=dict, hash=False)
    open: bool = False
    text: str = field()

    @text.default
    def _describe(self) -> str:
        listed = f"one of {', '.join(map(repr, self.values))}"
        return f"{listed}, or a dotted vendor name" if self.open else listed

    def canonical(self, value: Any) -> str:
        """Return the canonical form."""
        if isinstance(value, str):
            name = self.aliases.get(value, value)
            if name in self.values or (self.open and _OPEN_NAME.fullmatch(name)):
                return name
        raise self.refuse()


@frozen(kw_only=True)
class Level(Name):
    """Names in a rising order."""

    def rank(self, value: Any) -> int:
        """Return the place in the order."""
        return self.values.index(value)

    def example(self) -> str:
        """Return the highest one, as of every range that has no lower bound."""
        return self.values[-1]


@frozen(kw_only=True)
class Word(Domain):
    """Any lower-case word: a device type, a vendor."""

    text: str = "a lower-case word"

    def canonical(self, value: Any) -> str:
        """Return the value itself, if it is one of this domain."""
        if not isinstance(value, str) or re.fullmatch(r"[a-z][a-z0-9_]*", value) is None:
            raise self.refuse()
        return value


@frozen(kw_only=True)
class Text(Domain):
    """Any text that is not empty."""

    text: str = "a text"

    def canonical(self, value: Any) -> str:
        """Return the value itself, if it is one of this domain."""
        if not isinstance(value, str) or not value:
            raise self.refuse()
        return value


@frozen(kw_only=True)
class Names(Domain):
    """A set of names, kept in a canonical order. Asking for it asks for each of them."""

    each: Name
    empty: bool = True
    text: str = field()

    @text.default
    def _describe(self) -> str:
        return f"a list, each {self.each.text}"

    def canonical(self, value: Any) -> tuple[str, ...]:
        """Return the canonical form."""
        if isinstance(value, str) or not isinstance(value, (tuple, list, set, frozenset)) or not (value or self.empty):
            raise self.refuse()
        names = {self.each.canonical(item) for item in value}
        return tuple(sorted(names, key=lambda name: (self._place(name), name)))

    def _place(self, name: str) -> int:
        return self.each.values.index(name) if name in self.each.values else len(self.each.values)

    def dump(self, value: Any) -> list[str]:
        """Return a plain JSON value."""
        return list(value)


@frozen(kw_only=True)
class Table(Domain):
    """A table of plain values, kept as sorted pairs so that it hashes."""

    text: str = "a table of names to numbers, truth values or texts"

    def canonical(self, value: Any) -> tuple[tuple[str, int | float | bool | str], ...]:
        """Return the canonical form."""
        pairs = value.items() if isinstance(value, Mapping) else value
        try:
            table = dict(pairs)
        except (TypeError, ValueError):
            raise self.refuse() from None
        if not table or not all(
            isinstance(k, str) and isinstance(v, (int, float, bool, str)) for k, v in table.items()
        ):
            raise self.refuse()
        return tuple(sorted(table.items()))

    def dump(self, value: Any) -> dict[str, Any]:
        """Return a plain JSON value."""
        return dict(value)


@frozen(kw_only=True)
class Capability(Domain):
    """CUDA compute capabilities."""

    text: str = 'a compute capability such as "9.0", "9.0a" or "10.0f"'

    def canonical(self, value: Any) -> ComputeCapability:
        """Return the canonical form."""
        return parse_capability(value)

    def rank(self, value: ComputeCapability) -> tuple[int, int]:
        """Return the place in the order."""
        return value.number

    def allows(self, allowed: ComputeCapability, value: ComputeCapability) -> bool:
        """Whether the code that a manifest lists runs on the asked hardware."""
        return allowed.runs(value)

    def span(self, allowed: ComputeCapability) -> tuple[ComputeCapability, ComputeCapability] | None:
        """Return the ends of a family; minor numbers have one digit."""
        if allowed.suffix != "f":
            return None
        return ComputeCapability(allowed.major, allowed.minor), ComputeCapability(allowed.major, 9)

    def example(self) -> ComputeCapability:
        """Return the newest known, as of every range that has no lower bound."""
        return HARDWARE[-1]

    def dump(self, value: ComputeCapability) -> str:
        """Return a plain JSON value."""
        return str(value)
