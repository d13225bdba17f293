"""
Which distribution the package ``flash_attn`` is, of the two that put files into its folder. Nothing is imported.

``flash-attn`` (FlashAttention 2) has ``flash_attn/__init__.py``, and in some releases a folder ``flash_attn/cute`` that
is no FlashAttention 4. ``flash-attn-4`` has ``flash_attn/cute`` and nothing else: where it is alone, an import of
``flash_attn`` succeeds all the same, with an empty namespace. Whichever came last has overwritten the other's files.
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


INTERFACE: Final = "flash_attn_interface"
_HEADS: Final = (64, 96, 128, 192, 256)


def missing_for_fa3(agreement: Agreement) -> Reason | None:
    """Return what the installed build lacks for an agreement; None where it lacks nothing."""
    if find_spec(INTERFACE) is None:
        told = f"flash-attn-3 is installed, and there is no module {INTERFACE}"
        return _reason("broken", told, "install FlashAttention 3 as its hopper/setup.py builds it")
    if not any(_binaries()):
        told = "flash-attn-3 comes without kernels: no flash_attn_3/_C"
        return _reason("broken", told, "install a wheel for this torch and CUDA")
    flags = disabled()
    lacking = [flag for flag in needed(agreement) if flag in flags]
    if lacking:
        names = ", ".join(f"FLASH_ATTENTION_{flag}" for flag in lacking)
        return _reason("probe", f"this flash-attn-3 was compiled with {names}", f"compile it without {names}")
    size = agreement.requirements.head_size
    if all(f"DISABLE_HDIM{head}" in flags for head in _HEADS if head >= size):
        told = f"this flash-attn-3 was compiled without kernels for heads of {size}"
        head = next(head for head in _HEADS if head >= size)
        return _reason("probe", told, f"compile it without FLASH_ATTENTION_DISABLE_HDIM{head}")
    return None


def needed(agreement: Agreement) -> Iterator[str]:
    """Yield the features that an agreement's calls use, by the names of the flags that leave them out."""
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
    """Return the flags that the build was made with; none where it does not say, as builds of 2025 do not."""
    spec = find_spec("flash_attn_config")
    if spec is None or not spec.origin:
        return frozenset()
    flags = _config(Path(spec.origin).read_text(encoding="utf-8")).get("build_flags", {})
    return frozenset(
        name.replace("FLASHATTENTION_", "").replace("FLASH_ATTENTION_", "") for name in flags if flags[name]
    )


def _config(text: str) -> Mapping[str, Any]:
    """Return the literal that a module assigns to ``CONFIG``; an empty one where there is none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["CONFIG"]:
            found: Mapping[str, Any] = ast.literal_eval(node.value)
            return found
    return {}


def _binaries() -> Iterator[Path]:
    """Yield the compiled modules, in the package ``flash_attn_3``, which may be a mere folder."""
    spec = find_spec("flash_attn_3")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from Path(place).glob("_C.*")


def _reason(code: Literal["broken", "probe"], found: str, because: str) -> Reason:
    return Reason(code, "flash-attn-3", None, found, because)
