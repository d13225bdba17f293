"""
Reports what this machine lacks for the kernels of a variant, without importing a library or torch.

Absent distributions and unsupported versions are refused by the manifest already (`requires`).
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.negotiation import Reason
from attnplug_flash_attn import op_files, packages

if TYPE_CHECKING:
    from attnplug.negotiation import Agreement
    from attnplug.request import Device


def probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return the first missing requirement with its fix; None if nothing is missing."""
    if device.type != "cuda":
        return None  # the manifest refuses it, except in tests without a GPU
    return _torch() or _device() or _library(variant, agreement)


def _torch() -> Reason | None:
    build = torch_build()
    if build is None or build.cuda is not None:
        return None  # an unknown build is not refused
    because = "install a torch that is built for CUDA, from https://pytorch.org/get-started/locally"
    return Reason("broken", "torch", None, f"torch {build.version} is built without CUDA", because)


def _device() -> Reason | None:
    """Check for a CUDA device if torch is imported already. That creates no CUDA context."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available():
        return None
    because = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return Reason("broken", "device", None, f"torch {torch.__version__} sees no CUDA device", because)


def _library(variant: str, agreement: Agreement) -> Reason | None:
    if variant in op_files.LIBRARIES:
        return _op_library(op_files.LIBRARIES[variant])
    if variant == "fa2":
        return packages.missing_for_fa2()
    if variant == "fa3":
        return packages.missing_for_fa3(agreement)
    return packages.missing_for_fa4() if variant == "fa4" else None


def _op_library(name: str) -> Reason | None:
    try:
        installed = version(op_files.DISTRIBUTION)
    except PackageNotFoundError:
        return None  # the manifest refuses it
    file = op_files.find(name)
    if file is None:
        problem = f"vllm {installed} has no {name} in {op_files.FOLDER}"
        return Reason("broken", "vllm", None, problem, "install a CUDA build of vLLM")
    changed = op_files.changed_ops(name, file)
    if changed:
        problem = f"{', '.join(changed)} of {name} in vllm {installed} has an unsupported signature"
        return Reason("broken", "vllm", None, problem, "install another release of vLLM or of this plugin")
    return None


_TORCH_VERSION: Final = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_TORCH_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+))", re.MULTILINE)


@frozen
class TorchBuild:
    """
    A build of torch.

    Attributes:
        version: Its version, with its local label.
        cuda: Its CUDA version; None for builds for the CPU or another vendor.
    """

    version: str
    cuda: str | None


def torch_build() -> TorchBuild | None:
    """Return the build from torch's ``version.py``; None if the file is missing or unreadable."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    version, cuda = _TORCH_VERSION.search(text), _TORCH_CUDA.search(text)
    return None if version is None or cuda is None else TorchBuild(version[1], cuda[1])
