"""The entry point, imported to probe this backend, or once it is chosen. It imports neither torch nor Triton."""

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
    from attnplug_triton.backend import TritonBackend  # noqa: PLC0415 - the probe runs without torch

    return TritonBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return why the kernels cannot run on this machine, with a fix, or None. A missing Triton is the manifest's."""
    del variant, agreement
    # The manifest refuses other devices; a test's manifest may add one for the interpreter.
    return missing_cuda(device.vendor) if device.type == "cuda" else None
