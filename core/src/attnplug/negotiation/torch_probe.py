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


@frozen
class TorchBuild:
    """
    A build of torch.

    Attributes:
        version: Its version, with the local label, such as ``"2.11.0+cu130"``.
        cuda: The CUDA version that it was built for; None for the CPU or another vendor's devices.
    """

    version: str
    cuda: tuple[int, int] | None


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
    return TorchBuild(version[1], (int(cuda[1]), int(cuda[2])) if cuda[1] else None)


def missing_cuda() -> Reason | None:
    """
    Return why torch cannot use a CUDA device in this process, with a fix; None if nothing is found.

    A torch that is imported is checked for a device, which creates no CUDA context. Otherwise only its build is
    checked. A build that cannot be read is not refused: it may be a custom one.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        build = torch_build()
        return None if build is None or build.cuda is not None else _without_cuda(build.version)
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return _without_cuda(torch.__version__)
    found = f"torch {torch.__version__} sees no CUDA device"
    return Reason("broken", "device", None, found, "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def _without_cuda(version: str) -> Reason:
    fix = "install a torch that is built for CUDA, from https://pytorch.org/get-started/locally"
    return Reason("broken", "torch", None, f"torch {version} is built without CUDA", fix)
