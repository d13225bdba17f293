"""The plugin's manifest with one more device type: a CPU, on which Triton's interpreter runs the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attnplug_int8_ixformer

MANIFEST: Final = Path(str(attnplug_int8_ixformer.__file__)).with_name("attnplug.toml")

_OF_TRITON: Final = 'device_type = "cuda", compute_capability = { min = "8.0" }'


def write(folder: Path) -> Path:
    """Write it into a folder, and return its path."""
    text = MANIFEST.read_text(encoding="utf-8")
    assert text.count(_OF_TRITON) == 1
    path = folder / "attnplug.toml"
    path.write_text(text.replace(_OF_TRITON, 'device_type = ["cuda", "cpu"]'), encoding="utf-8")
    return path
