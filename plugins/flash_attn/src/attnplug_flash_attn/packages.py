"""
Checks the installed packages of FlashAttention 2, 3 and 4. Nothing is imported.

Two distributions have files in the folder ``flash_attn``. ``flash-attn`` (FlashAttention 2) has
``flash_attn/__init__.py``, and in some releases a folder ``flash_attn/cute`` that is not FlashAttention 4.
``flash-attn-4`` has only ``flash_attn/cute``: alone, ``import flash_attn`` still succeeds, with an empty namespace. The
distribution that is installed last overwrites the other's files. So it is with ``flash-attn-3`` and ``tokenspeed-fa3``,
two builds of FlashAttention 3.
"""

from __future__ import annotations

import ast
import base64
import hashlib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from attnplug.negotiation import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.negotiation import Agreement


FA4_FILE: Final = "flash_attn/cute/interface.py"
_FA4_IMPORTS: Final = {  # the modules that FlashAttention 4 imports, and their distributions
    "cutlass": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "tvm_ffi": "apache-tvm-ffi",
    "einops": "einops",
}


def missing_for_fa2() -> Reason | None:
    """Return what a FlashAttention 2 installation lacks; None if it is complete."""
    name = "flash-attn"
    try:
        installed = version(name)
    except PackageNotFoundError:
        return None  # the manifest refuses it
    spec = find_spec("flash_attn")
    if spec is None:
        return _broken(name, installed, "but there is no package flash_attn")
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or ())
        return _broken(name, installed, f"but import flash_attn finds {places}, without FlashAttention 2")
    if find_spec("flash_attn_2_cuda") is None:
        because = "install a wheel for this torch and CUDA, or build it without FLASH_ATTENTION_SKIP_CUDA_BUILD"
        return Reason(
            "broken",
            name,
            None,
            f"{name} {installed} is installed without kernels: there is no flash_attn_2_cuda",
            because,
        )
    return None


def missing_for_fa4() -> Reason | None:
    """Return what a FlashAttention 4 installation lacks; None if it is complete."""
    name = "flash-attn-4"
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None  # the manifest refuses it
    if found.files is not None and any(str(file) == FA4_FILE for file in found.files):
        reason = _misplaced(found)
        if reason is not None:
            return reason
    missing = [source for module, source in _FA4_IMPORTS.items() if find_spec(module) is None]
    if missing:
        problem = f"{name} {found.version} is installed without {', '.join(missing)}"
        return Reason("broken", name, None, problem, f"pip install {' '.join(missing)}")
    return None


def _misplaced(found: Distribution) -> Reason | None:
    """Compare the files of the distribution with those that an import would find."""
    file = Path(str(found.locate_file(FA4_FILE)))
    if not file.is_file():
        return _broken("flash-attn-4", found.version, f"but {file} does not exist")
    spec = find_spec("flash_attn")
    places = (spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
    if file.parents[1].resolve() not in {Path(place).resolve() for place in places}:
        others = ", ".join(places) or "nothing"
        problem = f"flash-attn-4 {found.version} is in {file.parents[2]}, but import flash_attn finds {others}"
        return Reason("broken", "flash-attn-4", None, problem, "install both into one folder, or only one of them")
    if _is_overwritten(found, FA4_FILE):
        return _broken("flash-attn-4", found.version, f"but flash-attn, installed later, has overwritten {file}")
    return None


def _is_overwritten(found: Distribution, name: str) -> bool:
    """Whether a file differs from the hash in its distribution's record."""
    recorded = [path.hash.value for path in found.files or () if str(path) == name and path.hash is not None]
    file = Path(str(found.locate_file(name)))
    digest = hashlib.sha256(file.read_bytes()).digest() if recorded else b""  # as in wheels and by pip
    return bool(recorded) and base64.urlsafe_b64encode(digest).rstrip(b"=").decode() not in recorded


def _broken(name: str, installed: str, problem: str) -> Reason:
    build = "--no-build-isolation " if name == "flash-attn" else ""  # its build imports the installed torch
    because = f"pip install --force-reinstall --no-deps {build}{name}=={installed}"
    return Reason("broken", name, None, f"{name} {installed} is installed, {problem}", because)


INTERFACE: Final = "flash_attn_interface"
_HEADS: Final = (64, 96, 128, 192, 256)
_BUILDS: Final = {"flash-attn-3": "tokenspeed-fa3", "tokenspeed-fa3": "flash-attn-3"}


def overwritten_fa3(name: str) -> Reason | None:
    """Return that the other build of FlashAttention 3 has overwritten this one; None if it has not."""
    file = f"{INTERFACE}.py"
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None  # the manifest refuses it
    if not Path(str(found.locate_file(file))).is_file() or not _is_overwritten(found, file):
        return None
    other = _BUILDS[name]
    problem = f"{name} {found.version} is installed, but {other}, installed later, has overwritten {file}"
    return Reason("broken", name, None, problem, f"pip uninstall {other}, then install {name} again")


def missing_for_fa3(agreement: Agreement) -> Reason | None:
    """Return what a FlashAttention 3 build lacks for an agreement; None if it lacks nothing."""
    reason = overwritten_fa3("flash-attn-3")
    if reason is not None:
        return reason
    if find_spec(INTERFACE) is None:
        problem = f"flash-attn-3 is installed, but there is no module {INTERFACE}"
        return _reason("broken", problem, "install FlashAttention 3 as built by its hopper/setup.py")
    if not any(_binaries()):
        problem = "flash-attn-3 is installed without kernels: there is no flash_attn_3/_C"
        return _reason("broken", problem, "install a wheel for this torch and CUDA")
    flags = disabled()
    missing = [flag for flag in needed(agreement) if flag in flags]
    if missing:
        names = ", ".join(f"FLASH_ATTENTION_{flag}" for flag in missing)
        return _reason("probe", f"this flash-attn-3 is compiled with {names}", f"compile it without {names}")
    size = agreement.requirements.head_size
    if all(f"DISABLE_HDIM{head}" in flags for head in _HEADS if head >= size):
        problem = f"this flash-attn-3 is compiled without kernels for head size {size}"
        head = next(head for head in _HEADS if head >= size)
        return _reason("probe", problem, f"compile it without FLASH_ATTENTION_DISABLE_HDIM{head}")
    return None


def needed(agreement: Agreement) -> Iterator[str]:
    """Yield the features that an agreement uses, by the names of the build flags that disable them."""
    required = agreement.requirements
    yield "DISABLE_VARLEN"
    if required.paged:
        yield "DISABLE_PAGEDKV"
    if required.sliding_window is not None:
        yield "DISABLE_LOCAL"
    if required.logits_soft_cap is not None:
        yield "DISABLE_SOFTCAP"
    if required.dtype == "float16":
        yield "DISABLE_FP16"
    if agreement.kv_cache_dtype.startswith("fp8"):
        yield "DISABLE_FP8"


def disabled() -> frozenset[str]:
    """Return the flags of the build; empty if the build does not record them, as in 2025."""
    spec = find_spec("flash_attn_config")
    if spec is None or not spec.origin:
        return frozenset()
    flags = _config(Path(spec.origin).read_text(encoding="utf-8")).get("build_flags", {})
    return frozenset(
        name.replace("FLASHATTENTION_", "").replace("FLASH_ATTENTION_", "") for name in flags if flags[name]
    )


def _config(text: str) -> Mapping[str, Any]:
    """Return the literal that a module assigns to ``CONFIG``; empty if there is none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["CONFIG"]:
            found: Mapping[str, Any] = ast.literal_eval(node.value)
            return found
    return {}


def _binaries() -> Iterator[Path]:
    """Yield the compiled modules in the package ``flash_attn_3``, which may be a namespace package."""
    spec = find_spec("flash_attn_3")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from Path(place).glob("_C.*")


def _reason(code: Literal["broken", "probe"], found: str, because: str) -> Reason:
    return Reason(code, "flash-attn-3", None, found, because)
