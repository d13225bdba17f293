"""The text that prompts and sentences are cut from."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnplug.errors import RequestError

_LEAST: Final = 200


def read_text(path: str | None) -> tuple[bytes, str]:
    """
    Return the text and where it is from: a file, the README of this folder, or the package's own description.

    Args:
        path: The file; None for one of the others.

    Raises:
        RequestError: The file does not open, or is too short.
    """
    here = Path(path or "README.md")
    if path is None and not here.is_file():
        import attnplug  # noqa: PLC0415 - only without a README

        return _long_enough(str(attnplug.__doc__).encode(), "attnplug's own description")
    try:
        return _long_enough(here.read_bytes(), str(here))
    except OSError as error:
        raise RequestError(
            f"--text {path} was given", f"it does not open: {error.strerror}", "name a file that holds some text"
        ) from error


def _long_enough(text: bytes, origin: str) -> tuple[bytes, str]:
    if len(text) < _LEAST:
        raise RequestError(
            f"{origin} has {len(text)} bytes", f"prompts are cut from at least {_LEAST}", "pass --text FILE"
        )
    return text, origin
