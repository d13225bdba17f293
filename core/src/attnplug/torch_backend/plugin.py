"""The entry point of the built-in backend: the two hooks of a plugin. torch is imported inside them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from attnplug.contract.hooks import hookimpl
from attnplug.negotiation.reason import Reason

if TYPE_CHECKING:
    from attnplug.contract.vendor import Backend
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.device import Device


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class of a variant."""
    del agreement
    from attnplug.torch_backend.backend import FlexBackend, TorchBackend  # noqa: PLC0415 - torch loads here

    return FlexBackend if variant == "flex" else TorchBackend


@hookimpl
def attnplug_probe(variant: str, device: Device) -> Reason | None:
    """
    Look for the device with torch, and for the C compiler with which Triton compiles a launcher for its kernels. What
    is missing refuses every request on the device.
    """
    missing = _missing_device(device)
    if missing is not None:
        return missing
    compilers = (os.environ.get("CC", ""), "gcc", "clang", "cc")
    if variant != "flex" or any(shutil.which(compiler) for compiler in compilers):
        return None
    because = "install gcc or clang, or set CC to a C compiler"
    return Reason("probe_device", variant, None, "Triton requires a C compiler, and none is on the PATH", because)


def _missing_device(device: Device) -> Reason | None:
    """Return why torch does not see a device of this type; a torch without CUDA supports the type, and has none."""
    import torch  # noqa: PLC0415 - as above

    is_amd = device.vendor == "amd"
    is_built = torch.version.hip is not None or (torch.version.cuda is not None and not is_amd)
    # A torch for CUDA beside an AMD device sees NVIDIA's, where it sees any.
    if device.type == "cpu" or (torch.get_device_module(device.type).is_available() and (is_built or not is_amd)):
        return None
    platform = "ROCm" if is_amd else "CUDA"
    seen = "AMD" if is_amd else "cuda"
    without = "" if is_built else f"is built without {platform}, and "
    found = f"this torch ({torch.__version__}) {without}sees no {seen} device"
    tools = "rocm-smi and HIP_VISIBLE_DEVICES" if is_amd else "nvidia-smi and CUDA_VISIBLE_DEVICES"
    fix = f"check {tools}" if is_built else f"install a torch that is built for {platform}"
    return Reason("probe_device", "torch", None, found, f"{fix}, or select for Device.cpu()")
