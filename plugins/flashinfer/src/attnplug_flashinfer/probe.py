"""
What this machine lacks for the kernels, found without importing the library or torch.

That the library is absent, or there in another version, its manifest says already (`requires`).
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
"""The least CUDA version of torch for which the library takes its kernels for Hopper (its ``is_sm90a_supported``)."""


def probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return the first thing that is missing, with what was found and the fix; None where nothing is."""
    if device.type != "cuda":
        return None  # the manifest has refused it, unless somebody declares another device in order to test without one
    return _torch(variant) or _device() or _companions() or _compiled(agreement, device)


def _torch(variant: str) -> Reason | None:
    build = torch_build()
    if build is None:
        return None  # an odd build of torch: whoever made it knows
    named = f"torch {build.version}"
    if build.cuda is None:
        because = "install a torch that is built for CUDA, from https://pytorch.org/get-started/locally"
        return Reason("broken", "torch", None, f"{named} is built without CUDA", because)
    if variant == "fa3" and build.cuda < FA3_CUDA:
        least = ".".join(map(str, FA3_CUDA))
        found = f"{named} is built for CUDA {'.'.join(map(str, build.cuda))}, and the kernels for Hopper need {least}"
        return Reason(
            "broken", "torch", None, found, f"install a torch for CUDA {least} or newer, or use flashinfer/fa2"
        )
    return None


def _device() -> Reason | None:
    """Ask torch where it is loaded anyway, as it is once the contract is; that creates no CUDA context."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        return None
    because = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return Reason("broken", "device", None, f"torch {torch.__version__} sees no CUDA device", because)


def _companions() -> Reason | None:
    """The library refuses to be imported beside its own compiled kernels of another version."""
    library = _version("flashinfer-python")
    if library is None or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return None
    for name in ("flashinfer-jit-cache", "flashinfer-cubin"):
        found = _version(name)
        if found is not None and found.partition("+")[0] != library.partition("+")[0]:
            because = f"install {name}=={library}, or uninstall it"
            told = f"{name} {found} is installed beside flashinfer-python {library}, which refuses to be imported then"
            return Reason("broken", name, None, told, because)
    return None


def _compiled(agreement: Agreement, device: Device) -> Reason | None:
    """Nothing is compiled where every kernel comes compiled."""
    lacking = missing_modules(agreement, device)
    return missing_tool(lacking) if lacking else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_TORCH_VERSION: Final = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_TORCH_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"](\d+)\.(\d+))", re.MULTILINE)


@frozen
class TorchBuild:
    """
    A build of torch.

    Attributes:
        version: Its version, with the label of the build.
        cuda: The CUDA version that it was built for, or None: for the CPU or another vendor.
    """

    version: str
    cuda: tuple[int, int] | None


def torch_build() -> TorchBuild | None:
    """Return the build from torch's ``version.py``; None where there is none, or none that reads like one."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    version, cuda = _TORCH_VERSION.search(text), _TORCH_CUDA.search(text)
    if version is None or cuda is None:
        return None
    return TorchBuild(version[1], (int(cuda[1]), int(cuda[2])) if cuda[1] else None)
