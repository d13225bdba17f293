"""
The state of torch, for a plugin's probe: its build, and whether it can use a CUDA device.

Nothing here imports torch: a probe runs before a backend is chosen, and torch takes seconds to import.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attrs import frozen

from attnplug.negotiation.reason import Reason

_VERSION: Final = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"](\d+)\.(\d+))", re.MULTILINE)
_HIP: Final = re.compile(r"^hip\b[^=\n]*=\s*['\"]", re.MULTILINE)


@frozen
class TorchBuild:
    """
    A build of torch.

    Attributes:
        version: Its version, with the local label, such as ``"2.11.0+cu130"``.
        cuda: The CUDA version that it was built for; None for the CPU or another vendor's devices.
        has_hip: Whether it was built for AMD devices.
    """

    version: str
    cuda: tuple[int, int] | None
    has_hip: bool = False


def torch_build() -> TorchBuild | None:
    """Return the installed build, from torch's ``version.py``; None if that file is missing or has another form."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    version, cuda = _VERSION.search(text), _CUDA.search(text)
    if version is None or cuda is None:
        return None
    return TorchBuild(version[1], (int(cuda[1]), int(cuda[2])) if cuda[1] else None, bool(_HIP.search(text)))


def missing_cuda(vendor: str | None = "nvidia") -> Reason | None:
    """
    Return why torch cannot use a device of type cuda in this process, with a fix; None if nothing is found.

    A torch that is imported is checked for a device, which creates no CUDA context. Otherwise only its build is
    checked. A build that cannot be read is not refused: it may be a custom one.

    Args:
        vendor: The device's; ``"amd"`` requires a torch that is built for ROCm, and others one for CUDA.
    """
    torch, is_amd = sys.modules.get("torch"), vendor == "amd"
    if torch is None:
        build = torch_build()
        if build is None or (build.has_hip if is_amd else build.cuda is not None):
            return None
        return _not_built(build.version, is_amd=is_amd)
    if torch.cuda.is_available() and not (is_amd and torch.version.hip is None):
        return None
    if (torch.version.hip if is_amd else torch.version.cuda) is None:
        return _not_built(torch.__version__, is_amd=is_amd)
    found = f"torch {torch.__version__} sees no {'AMD' if is_amd else 'CUDA'} device"
    tools = "rocm-smi and HIP_VISIBLE_DEVICES" if is_amd else "nvidia-smi and CUDA_VISIBLE_DEVICES"
    return Reason("broken", "device", None, found, f"check {tools}")


def _not_built(version: str, *, is_amd: bool) -> Reason:
    platform = "ROCm" if is_amd else "CUDA"
    fix = f"install a torch that is built for {platform}, from https://pytorch.org/get-started/locally"
    return Reason("broken", "torch", None, f"torch {version} is built without {platform}", fix)
