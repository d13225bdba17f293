"""The entry point: imported once this backend is chosen. A kernel library is loaded with the backend, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug_flash_attn.probe import probe

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Reason
    from attnplug.contract import Backend


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class, the same for all variants: which library they call is settled behind it."""
    del variant, agreement
    from attnplug_flash_attn.backend import FlashAttentionBackend  # noqa: PLC0415 - torch loads with the choice

    return FlashAttentionBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Say what this machine lacks for running the kernels; None: nothing."""
    return probe(variant, agreement, device)
