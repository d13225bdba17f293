"""
TOML, read with the standard library from Python 3.11 on, and with tomli before. The parser is imported when the first
file is read: it costs 10 ms.
"""

from __future__ import annotations

import sys
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """
    Parse a TOML document.

    Raises:
        ValueError: The text is not TOML; the message gives the line.
    """
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - see the module docstring
    else:
        import tomli as tomllib  # noqa: PLC0415
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
