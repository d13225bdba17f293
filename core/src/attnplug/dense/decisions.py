"""
The cache of decisions: the first call of a kind decides, those that follow repeat it.

An entry holds for one scope (`scope_key`) and one device. It holds no tensor of a caller: it is dropped with the first
object that it was derived from.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from weakref import WeakValueDictionary, ref

import torch

from attnplug.selection.process import current_state
from attnplug.selection.scope import scope_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, MutableMapping, Sequence

    from attnplug.request.device import Device

T = TypeVar("T")
_CPU: Final = torch.device("cpu")


class DecisionCache(Generic[T]):
    """
    Decisions by what they depend on; the oldest makes room.

    Decisions from before the last change of the registry or the settings are dropped.

    Args:
        most: Entries, of each thread with `per_thread`.
        per_thread: Whether each thread and each CUDA stream has separate entries, as anything with plans needs.
        scoped: Whether decisions depend on the registry and the settings; False where they follow from their sources.
        weak: Whether an entry lasts only as long as somebody holds the decision; `most` does not apply then.
        refusals: Errors that `get` keeps, too, and raises again.
    """

    def __init__(
        self,
        most: int = 256,
        *,
        per_thread: bool = False,
        scoped: bool = True,
        weak: bool = False,
        refusals: tuple[type[Exception], ...] = (),
    ) -> None:
        self._most = sys.maxsize if weak else most
        self._per_thread = per_thread
        self._scoped = scoped
        self._refusals = refusals
        self._place = _OwnPlace() if per_thread else _SharedPlace(WeakValueDictionary() if weak else {})

    def __len__(self) -> int:
        return len(self._place.entries)

    def get(
        self, call: Hashable, device: torch.device | Device | None, make: Callable[[], T], sources: Sequence[Any] = ()
    ) -> T:
        """
        Return the decision for a call: the kept one, or a new one.

        Args:
            call: All that the decision depends on, besides scope, device and sources.
            device: The device of the call; None where it makes no difference.
            make: Decides.
            sources: Tensors, modules and other objects that the decision is derived from, or None. A tensor with other
                values makes the decision invalid. Nothing is kept for a tensor on a device: comparing its values would
                wait, and no counter has the writes of `.data`, kernels and replayed graphs.

        Raises:
            Exception: Raised by `make`; of a kept refusal, a copy.
        """
        key = self.key(call, device, sources)
        found = self.find(key, sources)
        if found is None:
            try:
                found = make()
            except self._refusals as error:
                self.keep(key, _Refusal(error), sources)
                raise
            self.keep(key, found, sources)
        if isinstance(found, _Refusal):
            raise found.again()
        return found

    def key(
        self, call: Hashable, device: torch.device | Device | None, sources: Sequence[Any] = ()
    ) -> tuple[Hashable, ...]:
        """Return the key of a call for `find` and `keep`, which make `get` without a closure."""
        key: tuple[Hashable, ...] = (call, device, scope_key() if self._scoped else None)
        if sources:
            key = (*key, *map(id, sources))
        # The type of a device takes longer than all else here.
        if self._per_thread and device != _CPU and device is not None and device.type == "cuda":
            stream = torch.cuda.current_stream(device)  # type: ignore[arg-type] # with plans it is torch's
            return (*key, stream.cuda_stream)
        return key

    def find(self, key: Hashable, sources: Sequence[Any] = ()) -> T | None:
        """Return the kept decision, or None."""
        found: Any = self._place.entries.get(key)
        if found is None or not sources:
            return found  # type: ignore[no-any-return] # of this cache's type
        for one, given in zip(found.sources, sources, strict=True):
            if one is not None and not one.is_same(given):
                return None
        return found.decision  # type: ignore[no-any-return] # likewise

    def keep(self, key: Hashable, decision: T | _Refusal, sources: Sequence[Any] = ()) -> None:
        """Keep a decision under the key that the call had before it was decided."""
        table = self._place.table
        entries = table.entries
        if self._scoped and table.generation != (generation := current_state().generation):
            entries.clear()
            table.generation = generation
        if sources:
            entries[key] = _Derived(decision, sources, lambda _: entries.pop(key, None))
        else:
            entries[key] = decision
        if len(entries) > self._most:
            for oldest in list(entries)[: -self._most]:  # a copy: other threads and weak references change the table
                entries.pop(oldest, None)


def clear_decisions() -> None:
    """
    Forget all that dense calls and hosts keep, in every thread: decisions, implementations, plans.

    The next calls decide again. It frees memory; changes of settings or of installed backends do without it.
    """
    for held in _tables.valuerefs():  # a list: threads begin and end meanwhile
        table = held()
        if table is not None:
            table.entries.clear()


class _Table:
    """Entries of one generation of the process's state."""

    def __init__(self, entries: MutableMapping[Any, Any]) -> None:
        self.entries = entries
        self.generation = 0
        _tables[id(self)] = self


_tables: Final[WeakValueDictionary[int, _Table]] = WeakValueDictionary()


class _SharedPlace:
    def __init__(self, entries: MutableMapping[Any, Any]) -> None:
        self.table, self.entries = _Table(entries), entries


class _OwnPlace(threading.local):
    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        self.table = _Table(self.entries)


class _Derived:
    """A decision with the objects that it was derived from."""

    __slots__ = ("decision", "sources")

    def __init__(self, decision: Any, sources: Sequence[Any], drop: Callable[[object], object]) -> None:
        self.decision = decision
        self.sources = [None if one is None else _Source(one, drop) for one in sources]


class _Source:
    """An object as it was when a decision was derived from it."""

    __slots__ = ("_ref", "_values")

    def __init__(self, source: Any, drop: Callable[[object], object]) -> None:
        self._ref: Callable[[], Any] = ref(source, drop)
        # Writes by numpy, DLPack, `.data` and other owners of the storage count no version: values are compared.
        is_on_cpu = isinstance(source, torch.Tensor) and source.is_cpu
        self._values: torch.Tensor | None = source.detach().clone() if is_on_cpu else None

    def is_same(self, given: Any) -> bool:
        """Whether it is this object, unchanged: another object may have its address after it is gone."""
        if self._ref() is not given:
            return False
        values = self._values
        if values is None:
            return not isinstance(given, torch.Tensor)  # of a tensor on a device nothing is known without waiting
        return bool(given.is_cpu) and given.dtype == values.dtype and torch.equal(values, given)


class _Refusal:
    """An error without its traceback, whose frames hold the tensors of a call."""

    __slots__ = ("_error",)

    def __init__(self, error: Exception) -> None:
        self._error = _without_frames(error)

    def again(self) -> Exception:
        """Return the error for another call."""
        copy: Exception = _without_frames(self._error)
        return copy


def _without_frames(error: Any) -> Any:
    made = type(error).__new__(type(error), *error.args)
    for name, value in vars(error).items():
        setattr(made, name, _without_frames(value) if isinstance(value, BaseException) else value)
    made.__cause__ = error.__cause__ and _without_frames(error.__cause__)
    return made
