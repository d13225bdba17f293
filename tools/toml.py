"""Reads the TOML files of this repository: words, metadata of distributions, manifests."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pathlib import Path


def read_toml(path: Path) -> dict[str, Any]:
    """
    Return the content of a file.

    Raises:
        TOMLDecodeError: The file is not TOML.
    """
    return tomllib.loads(path.read_text(encoding="utf-8"))
