"""
What this machine lacks for the kernels of a variant, found without importing a library or torch.

That a distribution is absent, or there in another version, the manifest says already (`requires`).
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
    """Return the first thing that is missing, with what was found and the fix; None where nothing is."""
    if device.type != "cuda":
        return None  # the manifest has refused it, unless somebody declares another device in order to test without one
    return _torch() or _device() or _library(variant, agreement)


def _torch() -> Reason | None:
    build = torch_build()
    if build is None or build.cuda is not None:
        return None  # without a build that reads like one: an odd torch, whoever made it knows
    because = "install a torch that is built for CUDA, from https://pytorch.org/get-started/locally"
    return Reason("broken", "torch", None, f"torch {build.version} is built without CUDA", because)


def _device() -> Reason | None:
    """Ask torch where it is loaded anyway, as it is once the contract is; that creates no CUDA context."""
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
        return None  # the manifest has said so
    file = op_files.find(name)
    if file is None:
        found = f"vllm {installed} has no {name} in {op_files.FOLDER}"
        return Reason("broken", "vllm", None, found, "install the wheel of vLLM that is built for CUDA")
    changed = op_files.changed_ops(name, file)
    if changed:
        found = f"{', '.join(changed)} of {name} in vllm {installed} takes other arguments than are known here"
        return Reason("broken", "vllm", None, found, "install another release of vLLM, or one of this plugin")
    return None


_TORCH_VERSION: Final = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_TORCH_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+))", re.MULTILINE)


@frozen
class TorchBuild:
    """
    A build of torch.

    Attributes:
        version: Its version, with the label of the build.
        cuda: The CUDA version that it was built for, or None: for the CPU or another vendor.
    """

    version: str
    cuda: str | None


def torch_build() -> TorchBuild | None:
    """Return the build from torch's ``version.py``; None where there is none, or none that reads like one."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    version, cuda = _TORCH_VERSION.search(text), _TORCH_CUDA.search(text)
    return None if version is None or cuda is None else TorchBuild(version[1], cuda[1])
