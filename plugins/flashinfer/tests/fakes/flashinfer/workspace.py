"""The float workspace: bytes with counters of the kernels, which must be zero at first use."""

from __future__ import annotations

import weakref
from typing import Final

import torch
from torch import Tensor

from flashinfer.misuse import require

_SAMPLE: Final = 1 << 10
_known: dict[int, weakref.ref[Tensor]] = {}


def check_workspace(buffer: Tensor) -> None:
    """
    Check a float workspace.

    Raises:
        MisuseError: It is not a contiguous, aligned tensor of bytes, or not zero when a wrapper first gets it. Only
            a sample of the bytes is read, both ends included: reading all takes longer than a test.
    """
    require(buffer.dtype == torch.uint8, f"float_workspace_buffer is {buffer.dtype}, and its size is counted in bytes")
    require(buffer.ndim == 1 and buffer.is_contiguous(), "float_workspace_buffer is not a flat, contiguous tensor")
    require(buffer.data_ptr() % 16 == 0, "float_workspace_buffer is not aligned to 16 bytes")
    former = _known.get(buffer.data_ptr())
    if former is not None and former() is not None:
        return
    spread = buffer[:: max(1, buffer.numel() // _SAMPLE)]
    dirty = any(bool(part.any()) for part in (buffer[:_SAMPLE], spread, buffer[-_SAMPLE:]))
    require(not dirty, "float_workspace_buffer is not zero at its first use")
    _known[buffer.data_ptr()] = weakref.ref(buffer)
