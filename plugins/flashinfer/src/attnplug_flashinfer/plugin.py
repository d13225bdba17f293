"""The entry point: imported once this backend is chosen. FlashInfer itself is imported with the backend class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug_flashinfer.probe import probe

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Reason
    from attnplug.contract import Backend


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class, the same for both variants: they differ in what their wrappers are told."""
    del variant, agreement
    from attnplug_flashinfer.backend import FlashInferBackend  # noqa: PLC0415 - torch loads with the choice

    return FlashInferBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Say what this machine lacks for compiling and running the kernels; None: nothing."""
    return probe(variant, agreement, device)
