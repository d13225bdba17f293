"""Copies CPU tensors to a device without waiting, and without overwriting a copy that has not finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def upload(host: Tensor, device: torch.device, *, out: Tensor | None = None) -> Tensor:
    """
    Return the tensor on the device; the copy is ordered with the current stream.

    Each upload goes through separate pinned memory. torch's host allocator hands that memory out again when its copy
    is done, so that building step N + 1 overwrites nothing which step N still has to read, and `host` may be changed as
    soon as this returns.

    Args:
        host: A tensor on the CPU.
        device: Where it goes; on the CPU it is returned as it is.
        out: Persistent memory of the same shape and dtype that is written instead; a CPU tensor is copied into it too.
    """
    if out is not None:
        source = host if out.device.type == "cpu" else host.pin_memory()
        return out.copy_(source, non_blocking=True)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
