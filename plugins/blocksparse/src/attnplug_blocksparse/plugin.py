"""The entry point: imported once this backend is chosen. Triton is loaded with the backend, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug_blocksparse.probe import probe

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Reason
    from attnplug.contract import Backend


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class."""
    del variant, agreement
    from attnplug_blocksparse.backend import BlocksparseBackend  # noqa: PLC0415 - torch loads with the choice

    return BlocksparseBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Say what this machine lacks for running the kernels; None: nothing."""
    del variant, agreement
    return probe(device)
