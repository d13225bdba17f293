"""A read-only copy of a mapping: how frozen classes keep the mappings that they were given."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_only(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a view of a copy that nobody can change."""
    return MappingProxyType(dict(mapping))
