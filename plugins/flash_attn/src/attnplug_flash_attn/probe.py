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
    from pathlib import Path

    from attnplug.negotiation import Agreement
    from attnplug.request import Device


def probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return the first missing requirement with its fix; None if nothing is missing."""
    if device.type != "cuda":
        return None  # the manifest refuses it, except in tests without a GPU
    return missing_cuda() or _library(variant, agreement)


def _library(variant: str, agreement: Agreement) -> Reason | None:
    if variant in op_files.LIBRARIES:
        reason = packages.overwritten_fa3("tokenspeed-fa3") if variant == "fa3_tokenspeed" else None
        return reason or _op_library(op_files.LIBRARIES[variant], agreement)
    if variant == "fa2":
        return packages.missing_for_fa2()
    if variant == "fa3":
        return packages.missing_for_fa3(agreement)
    return packages.missing_for_fa4() if variant == "fa4" else None


def _op_library(name: str, agreement: Agreement) -> Reason | None:
    distribution = op_files.DISTRIBUTIONS[name]
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return None  # the manifest refuses it
    file = op_files.find(name)
    if file is None:
        problem = f"{distribution} {installed} has no {op_files.FILES[name]}"
        return Reason("broken", distribution, None, problem, f"install a CUDA build of {distribution}")
    changed = op_files.changed_ops(name, file)
    if changed:
        problem = f"{', '.join(changed)} of {name} in {distribution} {installed} has an unsupported signature"
        fix = f"install another release of {distribution} or of this plugin"
        return Reason("broken", distribution, None, problem, fix)
    return _unequal_sizes(name, file, agreement)


def _unequal_sizes(name: str, file: Path, agreement: Agreement) -> Reason | None:
    """Return that a library lacks the kernels for keys and values of two sizes; every build has those for one."""
    required = agreement.requirements
    size, size_v = required.head_size, required.head_size_v or required.head_size
    if size == size_v:
        return None
    if required.latent:  # the kernels get their rotary part as keys
        size -= size_v
    dtype = agreement.kv_cache_dtype if agreement.kv_cache_dtype.startswith("fp8") else required.dtype
    if op_files.has_kernels(file, dtype, size, size_v):
        return None
    distribution = op_files.DISTRIBUTIONS[name]
    installed = f"{distribution} {version(distribution)}"
    problem = f"{name} in {installed} has no {dtype} kernels for keys of {size} and values of {size_v} elements"
    return Reason("probe", distribution, None, problem, f"install a release of {distribution} that has them")
