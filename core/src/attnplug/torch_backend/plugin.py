"""The entry point of the embedded backend: the same two hooks as any plugin's. torch is imported inside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract.hooks import hookimpl

if TYPE_CHECKING:
    from attnplug.contract.backend import Backend
    from attnplug.negotiation.agreement import Agreement


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class of a variant."""
    del variant, agreement
    from attnplug.torch_backend.backend import SdpaBackend  # noqa: PLC0415 - torch loads with the choice, not before

    return SdpaBackend
