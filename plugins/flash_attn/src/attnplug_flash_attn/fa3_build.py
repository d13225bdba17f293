"""With which features FlashAttention 3 was compiled. Its ``flash_attn_config`` says so; it is read, not imported."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from attnplug.negotiation import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.negotiation import Agreement

INTERFACE: Final = "flash_attn_interface"
_HEADS: Final = (64, 96, 128, 192, 256)


def missing(agreement: Agreement) -> Reason | None:
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
    asked = agreement.requirements
    yield "DISABLE_VARLEN"
    if asked.paged:
        yield "DISABLE_PAGEDKV"
    if asked.sliding_window is not None:
        yield "DISABLE_LOCAL"
    if asked.logits_soft_cap is not None:
        yield "DISABLE_SOFTCAP"
    if asked.dtype == "float16":
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
