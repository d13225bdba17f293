"""The entry point, imported once this backend is chosen. FlashInfer itself is imported with the backend class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug_flashinfer.probe import probe

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Reason
    from attnplug.contract import Backend


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class, the same for both variants: they differ in the arguments of their wrappers."""
    del variant, agreement
    from attnplug_flashinfer.backend import FlashInferBackend  # noqa: PLC0415 - the probe runs without torch

    return FlashInferBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return what is missing here to compile and run the kernels; None where nothing is."""
    return probe(variant, agreement, device)
