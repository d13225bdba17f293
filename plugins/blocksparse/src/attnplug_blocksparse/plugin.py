"""
The entry point: imported to probe this backend, or once it is chosen.

It imports neither torch nor Triton: the backend module loads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug.negotiation import missing_cuda

if TYPE_CHECKING:
    from attnplug import Agreement, Device
    from attnplug.contract import Backend
    from attnplug.negotiation import Reason


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class."""
    del variant, agreement
    from attnplug_blocksparse.backend import BlocksparseBackend  # noqa: PLC0415 - torch loads with the choice

    return BlocksparseBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return why the kernels cannot run on this machine, with a fix, or None."""
    del variant, agreement
    return probe(device)


def probe(device: Device) -> Reason | None:
    """
    Return what is missing for a device, with a fix, or None.

    A missing Triton is not reported here: the manifest declares it (`requires`).
    """
    if device.type != "cuda":
        return None  # the manifest refuses other devices; a test's manifest may add one for the interpreter
    return missing_cuda()
