"""Notices metadata whose tensors moved, or whose numbers changed, since a graph was captured with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from attrs import frozen

from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.contract.builder import MetadataBuilder
    from attnplug.contract.metadata import Metadata

# The batch has a guard of its own; block numbers are looked at by guards, not by kernels.
_UNREAD: Final = ("batch", "highest_block", "slot", "agreement", "state")
_NUMBERS: Final = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, slice)


@frozen(eq=False)
class Snapshot:
    """
    A value as it was when a graph was captured.

    Attributes:
        value: The value. It is held, so that no other object gets its identity.
        fact: What of it a graph has frozen: where a tensor lies, a number itself; None where the parts say all.
        parts: Snapshots of what is inside, by name.
    """

    value: Any
    fact: Any = None
    parts: Mapping[str, Snapshot] = MappingProxyType({})

    def changes(self, found: Any, path: str) -> Iterator[str]:
        """Yield the paths of what differs in a value that a replay is to read in place of this one."""
        if found is self.value and _is_frozen(type(found)):
            return
        now = snapshot(found, parts=False)
        if now.fact != self.fact:
            yield path
            return
        inside = dict(_parts(found))
        if inside.keys() != self.parts.keys():
            yield path
            return
        for name, part in self.parts.items():
            yield from part.changes(inside[name], path + name)


def snapshot(value: Any, *, parts: bool = True) -> Snapshot:
    """
    Return what a captured graph freezes of a value.

    It looks into attrs classes, tuples, lists and mappings. Of any other object only the identity counts.
    """
    inside = dict(_parts(value))
    if isinstance(value, torch.Tensor):
        fact: Any = (value.data_ptr(), value.shape, value.stride(), value.dtype)
    elif isinstance(value, _NUMBERS):
        fact = value
    else:
        fact = type(value) if inside or isinstance(value, (tuple, list, Mapping)) else id(value)
    return Snapshot(value, fact, {name: snapshot(item) for name, item in inside.items()} if parts else {})


def snapshots(metadata: Metadata) -> dict[str, Snapshot]:
    """Return a snapshot of each field of metadata that a graph may read."""
    names = (field.name for field in attrs.fields(type(metadata)))
    return {name: snapshot(getattr(metadata, name)) for name in names if name not in _UNREAD}


def check_frozen(captured: Mapping[str, Snapshot], metadata: Metadata, builder: MetadataBuilder) -> None:
    """
    Compare metadata with that of the capture.

    Args:
        captured: The snapshots of the capture.
        metadata: What is to be replayed with.
        builder: Who built both.

    Raises:
        PluginContractError: They differ; the message names the fields.
    """
    changed = [path for name, before in captured.items() for path in before.changes(getattr(metadata, name), name)]
    if changed:
        plans = {f"plans[{key!r}]": impls[0].layer.name for key, impls in builder.plan_groups.items()}
        named = ", ".join(_with_layer(path, plans) for path in changed)
        raise PluginContractError(
            f"{builder.agreement.id} built metadata for a graph slot whose {named} changed since the capture",
            "a replay reads the tensors of the capture, and every Python value is frozen in it",
            "write into tensors that MetadataBuilder.once keeps, and bound what may grow by the slot's key",
        )


def _with_layer(path: str, plans: Mapping[str, str]) -> str:
    """The path of a plan by its layer: plan keys are long."""
    for prefix, layer in plans.items():
        if path.startswith(prefix):
            return f"plan of layer {layer!r}{path.removeprefix(prefix)}"
    return path


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif attrs.has(type(value)) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in attrs.fields(type(value)))


def _is_frozen(cls: type) -> bool:
    """Whether instances of a class cannot change, as far as attrs says."""
    properties = getattr(cls, "__attrs_props__", None)
    return bool(properties is not None and properties.is_frozen)
