"""What this machine lacks for a variant, found without importing torch, Triton or ixformer."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from attnplug import NoBackendError
from attnplug.errors import UnknownBackendError
from attnplug.negotiation import Reason
from attnplug_int8_ixformer.inner import choose

if TYPE_CHECKING:
    from attnplug import Agreement, Device

IXFORMER_MODULES: Final = ("ixformer.inference.functions", "ixformer.contrib.vllm_flash_attn")
"""Where the library has the calls that the provider makes."""


def probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return what is missing, with what was found and the fix; None where nothing is."""
    if variant == "calibration":
        return _lacks_inner(agreement, device)
    if variant == "ixformer":
        return _lacks_module()
    return _lacks_gpu(device)


def _lacks_inner(agreement: Agreement, device: Device) -> Reason | None:
    try:
        choose(agreement, device)
    except (NoBackendError, UnknownBackendError) as error:
        return Reason("probe", "inner", None, "no backend computes what is to be observed", str(error))
    return None


def _lacks_module() -> Reason | None:
    for name in IXFORMER_MODULES:
        try:
            found = find_spec(name)
        except ImportError:
            found = None
        if found is None:
            return Reason("broken", "ixformer", None, f"{name} is not there", "install ixformer from its vendor")
    return None


def _lacks_gpu(device: Device) -> Reason | None:
    torch = sys.modules.get("torch")  # loaded anyway once the contract is; asking it creates no CUDA context
    if device.type != "cuda" or torch is None or torch.cuda.is_available():
        return None  # the manifest has refused other devices, unless somebody declares one: the interpreter has any
    found = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
    because = "install a torch that is built for CUDA, and check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return Reason("broken", "torch", None, f"torch {torch.__version__} {found}", because)
