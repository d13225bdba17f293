"""The entry point, imported when this backend is chosen. The kernel library is imported with the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug_flash_attn.probe import probe

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Reason
    from attnplug.contract import Backend


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class, which is the same for all variants."""
    del variant, agreement
    from attnplug_flash_attn.backend import FlashAttentionBackend  # noqa: PLC0415 - imports torch

    return FlashAttentionBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return what this machine lacks to run the kernels; None if it lacks nothing."""
    return probe(variant, agreement, device)
