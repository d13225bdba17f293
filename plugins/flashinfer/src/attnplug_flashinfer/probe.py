"""
Finds what is missing for the kernels, without importing the library or torch.

The manifest covers a library that is missing or has another version (`requires`).
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.negotiation import Reason
from attnplug_flashinfer.prebuilt import missing_modules
from attnplug_flashinfer.toolchain import missing_tool

if TYPE_CHECKING:
    from attnplug.negotiation import Agreement
    from attnplug.request import Device

FA3_CUDA: Final = (12, 3)
"""The lowest CUDA version of torch with which the library runs its Hopper kernels (its ``is_sm90a_supported``)."""

_TORCH_VERSION: Final = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_TORCH_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"](\d+)\.(\d+))", re.MULTILINE)


@frozen
class TorchBuild:
    """
    A build of torch.

    Attributes:
        version: Its version, with the local label.
        cuda: The CUDA version that it was built for; None for the CPU or another vendor.
    """

    version: str
    cuda: tuple[int, int] | None


def torch_build() -> TorchBuild | None:
    """Return the installed build, read from torch's ``version.py``; None where it cannot be read."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    number, cuda = _TORCH_VERSION.search(text), _TORCH_CUDA.search(text)
    if number is None or cuda is None:
        return None
    return TorchBuild(number[1], (int(cuda[1]), int(cuda[2])) if cuda[1] else None)


def probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return the first thing that is missing, with what was found and the fix; None where nothing is."""
    if device.type != "cuda":
        return None  # the manifest refuses it, unless a test declares another device
    return _torch(variant) or _device() or _companions() or _compiled(agreement, device)


def _torch(variant: str) -> Reason | None:
    build = torch_build()
    if build is None:
        return None  # a custom build, which is not judged
    named = f"torch {build.version}"
    if build.cuda is None:
        fix = "install a torch that is built for CUDA, from https://pytorch.org/get-started/locally"
        return Reason("broken", "torch", None, f"{named} is built without CUDA", fix)
    if variant == "fa3" and build.cuda < FA3_CUDA:
        least = ".".join(map(str, FA3_CUDA))
        found = f"{named} is built for CUDA {'.'.join(map(str, build.cuda))}, and the Hopper kernels require {least}"
        fix = f"install a torch for CUDA {least} or newer, or use flashinfer/fa2"
        return Reason("broken", "torch", None, found, fix)
    return None


def _device() -> Reason | None:
    """Check the device through torch only if torch is loaded already. That creates no CUDA context."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        return None
    found = f"torch {torch.__version__} sees no CUDA device"
    return Reason("broken", "device", None, found, "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def _companions() -> Reason | None:
    """Check the packages of compiled kernels: the library's import fails beside one of another version."""
    library = _version("flashinfer-python")
    if library is None or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return None
    for name in ("flashinfer-jit-cache", "flashinfer-cubin"):
        installed = _version(name)
        if installed is not None and installed.partition("+")[0] != library.partition("+")[0]:
            found = f"{name} {installed} is installed with flashinfer-python {library}, whose import fails then"
            return Reason("broken", name, None, found, f"install {name}=={library}, or uninstall it")
    return None


def _compiled(agreement: Agreement, device: Device) -> Reason | None:
    """Check the toolchain, unless every module is installed compiled."""
    modules = missing_modules(agreement, device)
    return missing_tool(modules) if modules else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
