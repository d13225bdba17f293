"""Every field by name: those that the attributes of `Requirements` and `Device` declare, and what follows from them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from attnplug.request.device import FACTS
from attnplug.request.domains import Integer
from attnplug.request.field import Field, fields_in
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.request.field import Kind

_GQA_RATIO: Final = Field(
    "gqa_ratio",
    "derived",
    Integer(),
    "query heads per KV head: num_q_heads // num_kv_heads",
    open=True,
    has_ranges=True,
)
_ALL: Final = (*fields_in(Requirements), *(item for item, _ in FACTS), _GQA_RATIO)

FIELDS: Final[Mapping[str, Field]] = MappingProxyType({item.name: item for item in _ALL if item.kind != "selection"})
"""Every field that a manifest or a rule can be about, in the order in which they are reported."""


def fields_of(*kinds: Kind) -> tuple[Field, ...]:
    """Return the fields of these kinds, in table order."""
    return tuple(item for item in _ALL if item.kind in kinds)
