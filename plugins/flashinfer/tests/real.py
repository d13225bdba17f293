"""The plugin on FlashInfer itself."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch

from tests.backends.plugin import RealPlugin

VARIANTS: Final = ("fa2", "fa3")


def lacking(variant: str) -> str | None:
    """Return what a variant needs and this machine lacks; None if it lacks nothing."""
    if find_spec("flashinfer") is None:
        return "pip install 'flashinfer-python>=0.6.8,<0.7.3'"
    if variant == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        return "the fa3 kernels require compute capability 9.0"
    return None


FLASHINFER: Final = RealPlugin("flashinfer", "attnplug_flashinfer", lacking)
