"""The plugin's manifest with one more device type: a CPU, on which Triton's interpreter runs the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attnplug_int8_ixformer

MANIFEST: Final = Path(str(attnplug_int8_ixformer.__file__)).with_name("attnplug.toml")

_OF_TRITON: Final = 'device_type = "cuda", compute_capability = { min = "8.0" }'


_SIZES: Final = "head_size = { multiple_of = 16, min = 32, max = 256 }"


def write(folder: Path, *, few: bool = False) -> Path:
    """
    Write it into a folder, and return its path.

    Args:
        folder: Where to.
        few: Whether only some head sizes are declared, for a kit that is interpreted: on a GPU it runs all.
    """
    text = MANIFEST.read_text(encoding="utf-8")
    assert text.count(_OF_TRITON) == text.count(_SIZES) == 1
    text = text.replace(_OF_TRITON, 'device_type = ["cuda", "cpu"]')
    path = folder / "attnplug.toml"
    path.write_text(text.replace(_SIZES, "head_size = [64, 80]") if few else text, encoding="utf-8")
    return path
