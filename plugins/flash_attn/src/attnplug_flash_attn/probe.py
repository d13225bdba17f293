"""
Reports what this machine lacks for the kernels of a variant, without importing a library or torch.

Absent distributions and unsupported versions are refused by the manifest already (`requires`).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from attnplug.negotiation import Reason, missing_cuda
from attnplug_flash_attn import op_files, packages

if TYPE_CHECKING:
    from attnplug.negotiation import Agreement
    from attnplug.request import Device


def probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return the first missing requirement with its fix; None if nothing is missing."""
    if device.type != "cuda":
        return None  # the manifest refuses it, except in tests without a GPU
    return missing_cuda() or _library(variant, agreement)


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
