"""
The entry point: imported to probe this backend, or once it is chosen.

It imports neither torch nor Triton: the backend module loads them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attnplug.contract import hookimpl
from attnplug.negotiation import Reason

if TYPE_CHECKING:
    from attnplug import Agreement, Device
    from attnplug.contract import Backend


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
    torch = sys.modules.get("torch")  # is_available() creates no CUDA context
    if torch is None or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        found = f"torch {torch.__version__} is built without CUDA"
        because = "install a torch that is built for CUDA, from https://pytorch.org/get-started/locally"
        return Reason("broken", "torch", None, found, because)
    found = f"torch {torch.__version__} sees no CUDA device"
    return Reason("broken", "device", None, found, "check nvidia-smi and CUDA_VISIBLE_DEVICES")
