"""Everything that was asked of the fake, for tests to read; and which plans are still on their way to the device."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from attrs import define, field, frozen

from flashinfer.misuse import require

_F = TypeVar("_F", bound=Callable[..., Any])
_INNER = {"fast_decode_plan": "decode.fast_decode_plan"}  # what the package itself does not export


@frozen
class Call:
    """
    One call, as it was written.

    Attributes:
        callable: ``"Class.method"``, or the name of a function, with its module where the package does not export it.
        wrapper: The number of the wrapper; 0 for a function that has none.
        num_positional: Arguments by position, `self` left out.
        keywords: The names of the others.
        arguments: Its values by name, without tensors: they would live as long as the journal.
    """

    callable: str
    wrapper: int
    num_positional: int
    keywords: tuple[str, ...]
    arguments: dict[str, Any] = field(eq=False, repr=False)

    @property
    def kind(self) -> str:
        """``"__init__"``, ``"plan"`` or ``"run"``; the name of a function."""
        return self.callable.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """The class; empty for a function."""
        return self.callable.rpartition(".")[0]


@define(eq=False)
class Journal:
    """
    The log of a process.

    Attributes:
        calls: All calls that were not refused, in order.
        modules: The modules that were loaded, by name, and what each is for.
        in_flight: The numbers of the wrappers whose last plan may still be read from their staging memory.
    """

    calls: list[Call] = field(factory=list)
    modules: dict[str, tuple[Any, ...]] = field(factory=dict)
    pending: set[int] = field(factory=set)
    _copies_pend: bool = False
    _numbers: Iterator[int] = field(factory=functools.partial(itertools.count, 1))

    def clear(self) -> None:
        """Forget everything but the numbers."""
        self.calls.clear()
        self.modules.clear()
        self.pending.clear()

    def number(self) -> int:
        """Return the number of a new wrapper."""
        return next(self._numbers)

    def of(self, kind: str, owner: str | None = None) -> list[Call]:
        """Return the calls of a kind, of one class alone where it is named."""
        return [call for call in self.calls if call.kind == kind and owner in (None, call.owner)]

    @property
    def plans(self) -> list[Call]:
        """The plans, fast ones included."""
        return [call for call in self.calls if call.kind in ("plan", "fast_decode_plan")]

    @property
    def runs(self) -> list[Call]:
        """The runs."""
        return self.of("run")

    @contextmanager
    def pending_copies(self) -> Iterator[None]:
        """
        Let no copy of a plan arrive on the device while the body runs, unless `land` says that somebody waited for it.

        A second plan of one wrapper is refused then: it overwrites what the first one's copy has yet to read.
        """
        self._copies_pend = True
        try:
            yield
        finally:
            self._copies_pend = False
            self.pending.clear()

    def complete(self, *wrappers: int) -> None:
        """Say that somebody has waited for the copies of these wrappers, or of all."""
        self.pending.difference_update(wrappers or tuple(self.pending))

    def compile(self, name: str, *kernel: Any) -> None:
        """Note that a module is loaded, and compiled where a process and its disk know none of its name."""
        former = self.modules.setdefault(name, kernel)
        require(former == kernel, f"the module {name} is there for {former}, and a wrapper wants it for {kernel}")

    def stage(self, wrapper: int) -> None:
        """Note that a plan was written into a wrapper's staging memory, and that its copy has begun."""
        require(
            wrapper not in self.pending,
            f"plan() of wrapper {wrapper} overwrites the staging memory that its plan in flight is copied from",
        )
        if self._copies_pend:
            self.pending.add(wrapper)


journal = Journal()
"""The journal of this process."""


def recorded(function: _F) -> _F:
    """Write the calls of a function, or of a method of a wrapper, into the journal."""
    signature = inspect.signature(function)
    is_method = "." in function.__qualname__
    called = _INNER.get(function.__name__, function.__name__)

    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        owner = type(args[0]) if is_method else None
        if owner is None or getattr(owner, function.__name__) is recording:  # not where a subclass calls its parent's
            plain = {k: v for k, v in signature.bind(*args, **kwargs).arguments.items() if _is_plain(v)}
            name = called if owner is None else f"{_name_of(owner)}.{called}"
            number = getattr(args[0], "number", 0) if args else 0
            journal.calls.append(Call(name, number, len(args) - is_method, tuple(kwargs), plain))
        return result

    return recording  # type: ignore[return-value]


def _name_of(owner: type) -> str:
    """Return what the library calls a class, or the one that a plugin's is made from."""
    return next(each.__name__ for each in owner.__mro__ if each.__module__.partition(".")[0] == "flashinfer")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or type(value).__name__ == "dtype"
