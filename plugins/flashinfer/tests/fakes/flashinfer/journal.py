"""Records the calls of the fake, and the plans whose copies to the device are not complete."""

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
_INNER = {"fast_decode_plan": "decode.fast_decode_plan"}  # not exported by the package


@frozen
class Call:
    """
    One call.

    Attributes:
        callable: ``"Class.method"``, or the name of a function, with its module unless the package exports it.
        wrapper: The number of the wrapper; 0 for functions.
        num_positional: The number of positional arguments, without `self`.
        keywords: The names of the keyword arguments.
        arguments: The values by name, without tensors, which the journal would keep alive.
    """

    callable: str
    wrapper: int
    num_positional: int
    keywords: tuple[str, ...]
    arguments: dict[str, Any] = field(eq=False, repr=False)

    @property
    def kind(self) -> str:
        """Return ``"__init__"``, ``"plan"``, ``"run"``, or the name of a function."""
        return self.callable.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """Return the class; empty for functions."""
        return self.callable.rpartition(".")[0]


@define(eq=False)
class Journal:
    """
    The calls of a process.

    Attributes:
        calls: All calls that were not refused, in order.
        modules: The loaded modules, by name, with the kernel that each is compiled for.
        pending: The numbers of the wrappers whose last plan may still be copied from their staging memory.
    """

    calls: list[Call] = field(factory=list)
    modules: dict[str, tuple[Any, ...]] = field(factory=dict)
    pending: set[int] = field(factory=set)
    _copies_pend: bool = False
    _numbers: Iterator[int] = field(factory=functools.partial(itertools.count, 1))

    def clear(self) -> None:
        """Delete everything except the counter of wrappers."""
        self.calls.clear()
        self.modules.clear()
        self.pending.clear()

    def number(self) -> int:
        """Return the number of a new wrapper."""
        return next(self._numbers)

    def of(self, kind: str, owner: str | None = None) -> list[Call]:
        """Return the calls of a kind; only those of `owner`, if given."""
        return [call for call in self.calls if call.kind == kind and owner in (None, call.owner)]

    @property
    def plans(self) -> list[Call]:
        """Return all plans, fast plans included."""
        return [call for call in self.calls if call.kind in ("plan", "fast_decode_plan")]

    @property
    def runs(self) -> list[Call]:
        """Return all runs."""
        return self.of("run")

    @contextmanager
    def pending_copies(self) -> Iterator[None]:
        """
        Let all copies of plans stay incomplete while the body runs, except those passed to `complete`.

        A second plan of a wrapper is refused then, since it overwrites memory that the first copy still reads.
        """
        self._copies_pend = True
        try:
            yield
        finally:
            self._copies_pend = False
            self.pending.clear()

    def complete(self, *wrappers: int) -> None:
        """Complete the copies of these wrappers, or of all."""
        self.pending.difference_update(wrappers or tuple(self.pending))

    def compile(self, name: str, *kernel: Any) -> None:
        """Record that a module is loaded; it is compiled unless one of that name exists."""
        former = self.modules.setdefault(name, kernel)
        require(former == kernel, f"the module {name} is compiled for {former}, and a wrapper needs it for {kernel}")

    def stage(self, wrapper: int) -> None:
        """Record that a plan is in a wrapper's staging memory, and that its copy has begun."""
        require(
            wrapper not in self.pending,
            f"plan() of wrapper {wrapper} overwrites the staging memory of a plan that is still being copied",
        )
        if self._copies_pend:
            self.pending.add(wrapper)


journal = Journal()
"""The calls of this process."""


def recorded(function: _F) -> _F:
    """Record the calls of a function, or of a wrapper's method."""
    signature = inspect.signature(function)
    is_method = "." in function.__qualname__
    called = _INNER.get(function.__name__, function.__name__)

    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        owner = type(args[0]) if is_method else None
        if owner is None or getattr(owner, function.__name__) is recording:  # not the call of a parent's method
            plain = {k: v for k, v in signature.bind(*args, **kwargs).arguments.items() if _is_plain(v)}
            name = called if owner is None else f"{_name_of(owner)}.{called}"
            number = getattr(args[0], "number", 0) if args else 0
            journal.calls.append(Call(name, number, len(args) - is_method, tuple(kwargs), plain))
        return result

    return recording  # type: ignore[return-value]


def _name_of(owner: type) -> str:
    """Return the library's name for a class, or for the parent of a plugin's class."""
    return next(each.__name__ for each in owner.__mro__ if each.__module__.partition(".")[0] == "flashinfer")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or type(value).__name__ == "dtype"
