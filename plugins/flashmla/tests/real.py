"""The plugin on the library itself."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch

from tests.backends.plugin import RealPlugin


def lacking(variant: str) -> str | None:
    """Return what a variant needs and this machine lacks; None if it lacks nothing."""
    del variant
    if find_spec("flash_mla") is None:
        return "pip install --no-deps 'sgl-flash-mla>=1.0.0,<1.1'"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the kernels require compute capability 9.0"
    return None


FLASHMLA: Final = RealPlugin("flashmla", "attnplug_flashmla", lacking)
