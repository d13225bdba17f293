"""
Finds what is missing for the kernels, without importing the library or torch.

The manifest covers a library that is missing or has another version (`requires`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from attnplug.negotiation import Reason, missing_cuda, torch_build
from attnplug_flashinfer.prebuilt import installed_version, missing_modules
from attnplug_flashinfer.toolchain import missing_tool

if TYPE_CHECKING:
    from attnplug.negotiation import Agreement
    from attnplug.request import Device

FA3_CUDA: Final = (12, 3)
"""The lowest CUDA version of torch with which the library runs its Hopper kernels (its ``is_sm90a_supported``)."""


def probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return the first thing that is missing, with what was found and the fix; None where nothing is."""
    if device.type != "cuda":
        return None  # the manifest refuses it, unless a test declares another device
    return missing_cuda() or _cuda_version(variant) or _companions() or _compiled(agreement, device)


def _cuda_version(variant: str) -> Reason | None:
    build = torch_build()
    if variant != "fa3" or build is None or build.cuda is None or build.cuda >= FA3_CUDA:
        return None
    least = ".".join(map(str, FA3_CUDA))
    built_for = ".".join(map(str, build.cuda))
    found = f"torch {build.version} is built for CUDA {built_for}, and the Hopper kernels require {least}"
    fix = f"install a torch for CUDA {least} or newer, or use flashinfer/fa2"
    return Reason("broken", "torch", None, found, fix)


def _companions() -> Reason | None:
    """Check the packages of compiled kernels: the library's import fails beside one of another version."""
    library = installed_version("flashinfer-python")
    if library is None or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return None
    for name in ("flashinfer-jit-cache", "flashinfer-cubin"):
        installed = installed_version(name)
        if installed is not None and installed.partition("+")[0] != library.partition("+")[0]:
            found = f"{name} {installed} is installed with flashinfer-python {library}, whose import fails then"
            return Reason("broken", name, None, found, f"install {name}=={library}, or uninstall it")
    return None


def _compiled(agreement: Agreement, device: Device) -> Reason | None:
    """Check the toolchain, unless every module is installed compiled."""
    modules = missing_modules(agreement, device)
    return missing_tool(modules) if modules else None
