"""The entry point: imported once this backend is chosen. Kernels are loaded with the backend, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug_int8_ixformer.probe import probe

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Reason
    from attnplug.contract import Backend


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class: one that quantizes, or the observer of level 0."""
    del agreement
    if variant == "calibration":
        from attnplug_int8_ixformer.observer import ObserverBackend  # noqa: PLC0415 - torch loads with the choice

        return ObserverBackend
    from attnplug_int8_ixformer.backend import Int8Backend  # noqa: PLC0415 - likewise

    return Int8Backend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Say what this machine lacks for the variant; None: nothing."""
    return probe(variant, agreement, device)
