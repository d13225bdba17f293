"""
From the text of an attnplug.toml to a Manifest, or to a ManifestError with file, line and the rule that it breaks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attnplug.errors import ManifestError
from attnplug.manifest.reader import Reader
from attnplug.request.toml import parse_toml

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug.manifest.schema import Manifest


def read_manifest(path: Path) -> Manifest:
    """
    Read and parse a file.

    Raises:
        ManifestError: The file is not there, is not UTF-8 or TOML, or breaks a rule; `ApiVersionError`
            where it speaks another major version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"the manifest cannot be read: {error}",
            "it is a UTF-8 file beside the plugin module",
            "ship it in the wheel",
            str(path),
        ) from error
    return parse_manifest(text, str(path))


def parse_manifest(text: str, path: str = "attnplug.toml") -> Manifest:
    """
    Parse the text of a manifest.

    Raises:
        ManifestError: As for `read_manifest`.
    """
    try:
        data = parse_toml(text)
    except ValueError as error:
        found = re.search(r"at line (\d+)", str(error))
        raise ManifestError(
            f"it is not TOML: {error}",
            "a manifest is a TOML 1.0 document",
            "correct the syntax",
            path,
            int(found[1]) if found else None,
        ) from error
    return Reader(text, path).manifest(data)
