"""
Which distribution the package ``flash_attn`` is, of the two that put files into its folder. Nothing is imported.

``flash-attn`` (FlashAttention 2) has ``flash_attn/__init__.py``, and in some releases a folder ``flash_attn/cute`` that
is no FlashAttention 4. ``flash-attn-4`` has ``flash_attn/cute`` and nothing else: where it is alone, an import of
``flash_attn`` succeeds all the same, with an empty namespace. Whichever came last has overwritten the other's files.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attnplug.negotiation import Reason

FA4_MARK: Final = "flash_attn/cute/interface.py"
_NEEDS: Final = {  # what its modules import at their top: the modules, and where they come from
    "cutlass": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "tvm_ffi": "apache-tvm-ffi",
    "einops": "einops",
}


def missing_for_fa2() -> Reason | None:
    """Return what keeps ``flash_attn`` from being FlashAttention 2, compiled; None where nothing does."""
    name = "flash-attn"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return None  # the manifest has said so
    spec = find_spec("flash_attn")
    if spec is None:
        return _broken(name, installed, "and there is no package flash_attn")
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or ())
        return _broken(name, installed, f"but import flash_attn finds {places}, without FlashAttention 2")
    if find_spec("flash_attn_2_cuda") is None:
        because = "install a wheel for this torch and CUDA, or build it without FLASH_ATTENTION_SKIP_CUDA_BUILD"
        return Reason("broken", name, None, f"{name} {installed} comes without kernels: no flash_attn_2_cuda", because)
    return None


def missing_for_fa4() -> Reason | None:
    """Return what keeps ``flash_attn.cute`` from being FlashAttention 4, complete; None where nothing does."""
    name = "flash-attn-4"
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None  # the manifest has said so
    if found.files is not None and any(str(file) == FA4_MARK for file in found.files):
        reason = _misplaced(found)
        if reason is not None:
            return reason
    lacking = [source for module, source in _NEEDS.items() if find_spec(module) is None]
    if lacking:
        told = f"{name} {found.version} is installed without {', '.join(lacking)}"
        return Reason("broken", name, None, told, f"pip install {' '.join(lacking)}")
    return None


def _misplaced(found: Distribution) -> Reason | None:
    """Compare the files that the distribution has brought with those that an import would find."""
    file = Path(str(found.locate_file(FA4_MARK)))
    if not file.is_file():
        return _broken("flash-attn-4", found.version, f"but {file} is gone")
    spec = find_spec("flash_attn")
    places = (spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
    if file.parents[1].resolve() not in {Path(place).resolve() for place in places}:
        others = ", ".join(places) or "nothing"
        told = f"flash-attn-4 {found.version} lies in {file.parents[2]}, and import flash_attn finds {others}"
        return Reason("broken", "flash-attn-4", None, told, "install both into one folder, or one of them only")
    if _is_overwritten(found, file):
        return _broken("flash-attn-4", found.version, f"but {file} is another's: that of flash-attn, installed later")
    return None


def _is_overwritten(found: Distribution, file: Path) -> bool:
    """Whether a file is not the one that its distribution recorded when it was installed."""
    recorded = [path.hash.value for path in found.files or () if str(path) == FA4_MARK and path.hash is not None]
    digest = hashlib.sha256(file.read_bytes()).digest()  # what wheels and pip record
    return bool(recorded) and base64.urlsafe_b64encode(digest).rstrip(b"=").decode() not in recorded


def _broken(name: str, installed: str, told: str) -> Reason:
    build = "--no-build-isolation " if name == "flash-attn" else ""  # it is compiled, and its build imports torch
    because = f"pip install --force-reinstall --no-deps {build}{name}=={installed}"
    return Reason("broken", name, None, f"{name} {installed} is installed, {told}", because)
