"""Compares metadata with that of a graph's capture: addresses of tensors, and Python values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from attrs import frozen

from attnplug.contract.inputs.phase import BatchSplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# The batch is checked by `_check_fits`; guards read block numbers, kernels do not.
_UNREAD: Final = ("batch", "highest_block", "graph", "agreement", "state")
_NUMBERS: Final = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, slice)
_LEAVES: Final = (torch.Tensor, *_NUMBERS)
_COLLECTIONS: Final = (tuple, list, Mapping)


@frozen(eq=False)
class Snapshot:
    """
    A value as it was when a graph was captured.

    Attributes:
        value: The value. It is held, so that no other object gets its identity.
        fact: What a graph freezes of it: the address and form of a tensor, or a number; None where `parts` has it.
        parts: Snapshots of what is inside, by name.
        is_fixed: Whether the value itself, found again, is unchanged: no attribute of it can be set.
        is_leaf: Whether the fact is all of it.
        values_of: Returns what is inside of a value of the same type, in the order of `parts`, or None where a value
            has other parts; None for values of which only `changes` knows.
        inside: The snapshots in `parts`.
    """

    value: Any
    fact: Any = None
    parts: Mapping[str, Snapshot] = MappingProxyType({})
    is_fixed: bool = False
    is_leaf: bool = False
    values_of: Callable[[Any], Sequence[Any] | None] | None = None
    inside: tuple[Snapshot, ...] = ()

    def changes(self, found: Any, path: str) -> Iterator[str]:
        """Yield the paths of what differs in a value that a replay is to read in place of this one."""
        if _fact(found) != self.fact:
            yield path
            return
        inside = _parts(found)
        if inside.keys() != self.parts.keys():
            yield path
            return
        for name, part in self.parts.items():
            if not part.is_plainly_kept(inside[name]):
                yield from part.changes(inside[name], path + name)

    def is_plainly_kept(self, found: Any) -> bool:
        """Whether a value is the same without a doubt, as nearly every one is: no paths are made for it."""
        if found is self.value and self.is_fixed:
            return True
        if type(found) is not type(self.value):
            return False
        if self.is_leaf:
            return bool(_fact(found) == self.fact)
        values = None if self.values_of is None else self.values_of(found)
        if values is None or len(values) != len(self.inside):
            return False
        for part, item in zip(self.inside, values, strict=True):
            if not ((item is part.value and part.is_fixed) or part.is_plainly_kept(item)):
                return False
        return True


def snapshot(value: Any) -> Snapshot:
    """
    Return what a captured graph freezes of a value.

    It looks into attrs classes, tuples, lists and mappings. Of any other object only the identity counts.
    """
    parts = {name: snapshot(item) for name, item in _parts(value).items()}
    is_leaf = isinstance(value, _LEAVES) and not parts
    values_of = None if isinstance(value, _LEAVES) else _reader(value)
    return Snapshot(value, _fact(value), parts, _is_fixed(value), is_leaf, values_of, tuple(parts.values()))


def snapshots(metadata: Any) -> dict[str, Snapshot]:
    """Return a snapshot of each field of metadata that a graph may read."""
    names = (field.name for field in attrs.fields(type(metadata)))
    return {name: snapshot(getattr(metadata, name)) for name in names if name not in _UNREAD}


def changed_fields(captured: Mapping[str, Snapshot], metadata: object) -> list[str]:
    """Return the paths of what differs in metadata, field by field, from the snapshots of the capture."""
    differing: list[str] = []
    for name, before in captured.items():
        found = getattr(metadata, name)
        if not before.is_plainly_kept(found):
            differing += before.changes(found, name)
    return differing


def _fact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if isinstance(value, _NUMBERS):
        return value
    return type(value) if isinstance(value, _COLLECTIONS) or _names(value) else id(value)


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, (tuple, list)):
        return {f"[{index}]": item for index, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    return {f".{name}": getattr(value, name) for name in _names(value)}


def _reader(value: Any) -> Callable[[Any], Sequence[Any] | None] | None:
    """Return what reads the values of `_parts` from objects of this one's type; None where there is no fast way."""
    if isinstance(value, (tuple, list)):
        return _itself
    if type(value) is dict:
        return partial(_items, list(value))
    names = _names(value)
    return None if not names else partial(_only, names[0]) if len(names) == 1 else attrgetter(*names)


def _itself(found: Sequence[Any]) -> Sequence[Any]:
    return found


def _items(keys: list[Any], found: dict[Any, Any]) -> list[Any] | None:
    return [*found.values()] if [*found] == keys else None


def _only(name: str, found: Any) -> tuple[Any]:
    return (getattr(found, name),)


def _names(value: Any) -> tuple[str, ...]:
    """The fields of an attrs object, of any other none."""
    cls: Any = type(value)
    return _names_of(cls)


@cache
def _names_of(cls: type) -> tuple[str, ...]:
    # Of a mapping the items count, which need not be its fields.
    if not attrs.has(cls) or issubclass(cls, Mapping):
        return ()
    # Of metadata inside of metadata the same fields count.
    unread = _UNREAD if issubclass(cls, BatchSplit) else ()
    return tuple(field.name for field in attrs.fields(cls) if field.name not in unread)


def _is_fixed(value: Any) -> bool:
    """Whether an object cannot change, as far as attrs says."""
    properties = getattr(type(value), "__attrs_props__", None)
    return isinstance(value, _NUMBERS) or bool(properties is not None and properties.is_frozen)
