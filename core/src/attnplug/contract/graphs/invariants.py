"""Compares metadata with that of a graph's capture: addresses of tensors, and Python values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    """

    value: Any
    fact: Any = None
    parts: Mapping[str, Snapshot] = MappingProxyType({})
    is_fixed: bool = False

    def changes(self, found: Any, path: str) -> Iterator[str]:
        """Yield the paths of what differs in a value that a replay is to read in place of this one."""
        if self.is_plainly_kept(found):
            return
        if _fact(found) != self.fact:
            yield path
            return
        inside = _parts(found)
        if inside.keys() != self.parts.keys():
            yield path
            return
        for name, part in self.parts.items():
            yield from part.changes(inside[name], path + name)

    def is_plainly_kept(self, found: Any) -> bool:
        """Whether a value is the same without a doubt, as nearly every one is: no paths are made for it."""
        if found is self.value and self.is_fixed:
            return True
        if type(found) is not type(self.value):
            return False
        if isinstance(found, _LEAVES):
            return not self.parts and bool(_fact(found) == self.fact)
        inside = _values(found)
        if inside is None or len(inside) != len(self.parts):
            return False
        return all(map(Snapshot.is_plainly_kept, self.parts.values(), inside))


def snapshot(value: Any) -> Snapshot:
    """
    Return what a captured graph freezes of a value.

    It looks into attrs classes, tuples, lists and mappings. Of any other object only the identity counts.
    """
    parts = {name: snapshot(item) for name, item in _parts(value).items()}
    return Snapshot(value, _fact(value), parts, _is_fixed(value))


def snapshots(metadata: Any) -> dict[str, Snapshot]:
    """Return a snapshot of each field of metadata that a graph may read."""
    names = (field.name for field in attrs.fields(type(metadata)))
    return {name: snapshot(getattr(metadata, name)) for name in names if name not in _UNREAD}


def changed_fields(captured: Mapping[str, Snapshot], metadata: object) -> list[str]:
    """Return the paths of what differs in metadata, field by field, from the snapshots of the capture."""
    return [path for name, before in captured.items() for path in before.changes(getattr(metadata, name), name)]


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


def _values(value: Any) -> Sequence[Any] | None:
    """The values of `_parts` where their names follow from the type, else None."""
    if isinstance(value, (tuple, list)):
        return value
    return [getattr(value, name) for name in _names(value)] or None


def _names(value: Any) -> tuple[str, ...]:
    """The fields of an attrs object, of any other none."""
    cls: Any = type(value)
    return _names_of(cls)


@cache
def _names_of(cls: type) -> tuple[str, ...]:
    # Of a mapping the items count, which need not be its fields.
    return tuple(field.name for field in attrs.fields(cls)) if attrs.has(cls) and not issubclass(cls, Mapping) else ()


def _is_fixed(value: Any) -> bool:
    """Whether an object cannot change, as far as attrs says."""
    properties = getattr(type(value), "__attrs_props__", None)
    return isinstance(value, _NUMBERS) or bool(properties is not None and properties.is_frozen)
