"""What transformers assumes for a field that a config.json leaves out."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

LIBRARY: Final = "transformers 5.23"
"""Whose classes ``defaults.json`` was made from, by ``python -m tools.model_defaults --write``."""


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Return field name -> value; empty for a type that the library has no class for, and for an unknown one."""
    found: Mapping[str, Any] = _table().get(model_type, {})
    return found


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table
