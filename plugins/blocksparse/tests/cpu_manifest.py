"""The plugin's manifest with one more device type: a CPU, on which Triton's interpreter runs the kernels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import attnplug_blocksparse

MANIFEST: Final = Path(str(attnplug_blocksparse.__file__)).with_name("attnplug.toml")

_CHANGES: Final = (
    (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
    (r"^compute_capability = .*$", ""),
    (r'^need = \{ compute_capability = \{ min = "8.9" \} \}', "need = { block_sparse = true }"),
)


def write(folder: Path) -> Path:
    """Write it into a folder, and return its path."""
    text = MANIFEST.read_text(encoding="utf-8")
    for pattern, replacement in _CHANGES:
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        assert count, f"attnplug.toml has nothing like {pattern!r} any more"
    path = folder / "attnplug.toml"
    path.write_text(text, encoding="utf-8")
    return path
