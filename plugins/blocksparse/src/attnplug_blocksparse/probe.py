"""
What this machine lacks for the kernels, found without importing torch or Triton.

That Triton is absent, or there in another version, the manifest says already (`requires`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attnplug.negotiation import Reason

if TYPE_CHECKING:
    from attnplug.request import Device


def probe(device: Device) -> Reason | None:
    """Return what is missing, with what was found and the fix; None where nothing is."""
    if device.type != "cuda":
        return None  # the manifest has refused it, unless somebody declares another device: the interpreter has any
    torch = sys.modules.get("torch")  # loaded anyway once the contract is; asking it creates no CUDA context
    if torch is None or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        found = f"torch {torch.__version__} is built without CUDA"
        because = "install a torch that is built for CUDA, from https://pytorch.org/get-started/locally"
        return Reason("broken", "torch", None, found, because)
    found = f"torch {torch.__version__} sees no CUDA device"
    return Reason("broken", "device", None, found, "check nvidia-smi and CUDA_VISIBLE_DEVICES")
