"""vLLM's enum of attention backends, restored after a test that registers names."""

from __future__ import annotations

import copy
import copyreg
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


_TABLES = ("_member_map_", "_member_names_", "_value2member_map_")


@contextmanager
def restored() -> Iterator[Any]:
    """Yield the enum; after the ``with`` block its members, overrides and pickling are what they were."""
    from vllm.v1.attention.backends import registry  # noqa: PLC0415 - where vLLM is installed

    enum = registry.AttentionBackendEnum
    before = {name: getattr(enum, name) for name in _TABLES}
    overrides, reduce = dict(registry._ATTN_OVERRIDES), copyreg.dispatch_table.get(enum)
    for name, value in before.items():
        setattr(enum, name, copy.copy(value))
    try:
        yield enum
    finally:
        for name in set(enum._member_map_) - set(before["_member_map_"]):
            type.__delattr__(enum, name)  # an enum's own refuses to
        for name, value in before.items():
            setattr(enum, name, value)
        registry._ATTN_OVERRIDES.clear()
        registry._ATTN_OVERRIDES.update(overrides)
        copyreg.dispatch_table.pop(enum, None)
        if reduce is not None:
            copyreg.dispatch_table[enum] = reduce
