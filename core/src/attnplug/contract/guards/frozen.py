"""Notices metadata whose tensors moved, or whose numbers changed, since a graph was captured with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from attnplug.contract.metadata import Metadata

# The batch has a guard of its own; block numbers are looked at by guards, not by kernels.
_UNREAD: Final = ("batch", "highest_block", "slot", "agreement")
_NUMBERS: Final = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, slice)


def fingerprint(metadata: Metadata) -> dict[str, Any]:
    """
    Return what a captured graph has frozen of metadata, by the path of each value: numbers themselves, and where
    tensors lie.

    It looks into attrs classes, tuples, lists and mappings. Of any other object only the identity counts.
    """
    found: dict[str, Any] = {}
    for field in attrs.fields(type(metadata)):
        if field.name not in _UNREAD:
            _walk(field.name, getattr(metadata, field.name), found)
    return found


def check_frozen(captured: dict[str, Any], found: dict[str, Any], plugin_id: str) -> None:
    """
    Compare metadata with that of the capture.

    Raises:
        PluginContractError: They differ; the message names the fields.
    """
    if captured == found:
        return
    changed = sorted(path for path in captured.keys() | found.keys() if captured.get(path) != found.get(path))
    raise PluginContractError(
        f"{plugin_id} built metadata for a graph slot whose {', '.join(changed)} changed since the capture",
        "a replay reads the tensors of the capture, and every Python value is frozen in it",
        "write into tensors that GraphSlot.once keeps, and bound what may grow by the slot's key",
    )


def _walk(path: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    elif isinstance(value, _NUMBERS):
        found[path] = value
    elif isinstance(value, (tuple, list)):
        found[path] = len(value)
        for index, item in enumerate(value):
            _walk(f"{path}[{index}]", item, found)
    elif isinstance(value, Mapping):
        found[path] = len(value)
        for key, item in value.items():
            _walk(f"{path}[{key!r}]", item, found)
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            _walk(f"{path}.{field.name}", getattr(value, field.name), found)
    else:
        found[path] = (id(value), value)  # held, so that no other object gets its identity
