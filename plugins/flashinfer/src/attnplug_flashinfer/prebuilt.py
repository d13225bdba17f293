"""The compiled modules of the library that an agreement needs, and which of them do not come with an installation."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug_flashinfer.kernels import CUDA_CORE_GROUPS

if TYPE_CHECKING:
    from attnplug.negotiation.agreement import Agreement

_SHORT: Final = {"bfloat16": "bf16", "float16": "f16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def missing_modules(variant: str, agreement: Agreement) -> tuple[str, ...]:
    """Return the names of the modules that have to be compiled here. The library's wheel alone brings none."""
    folder = _folder()
    needed = needed_modules(variant, agreement)
    return tuple(name for name in needed if folder is None or not (folder / name / f"{name}.so").is_file())


def needed_modules(variant: str, agreement: Agreement) -> tuple[str, ...]:
    """
    Return the names of the modules that steps under an agreement may run.

    They are the library's own, from 0.6.8 to 0.7.2: ``get_batch_prefill_uri`` and ``get_batch_decode_uri`` in its
    ``jit/attention/modules.py``. Where device and group size decide between two decode kernels, both are named.
    """
    asked, kernel = agreement.requirements, agreement.options["decode_kernel"]
    window = asked.sliding_window is not None
    if asked.sinks:
        return (f"batch_prefill_attention_sink_{_SHORT[asked.dtype]}_swa_{window}_{variant}",)
    form = _form(agreement)
    prefill = f"batch_prefill_with_kv_cache_{form}_f16qk_False"
    names = [f"{prefill}_sm90" if variant == "fa3" else prefill]
    if asked.paged and kernel != "cuda_cores":
        names.append(prefill)  # decodes on tensor cores are prefills to the library
    if asked.paged and kernel != "tensor_cores" and asked.gqa_ratio in CUDA_CORE_GROUPS:
        names.append(f"batch_decode_with_kv_cache_{form}")
    if asked.cascade:
        names.append("cascade")
    return tuple(dict.fromkeys(names))


def _form(agreement: Agreement) -> str:
    asked = agreement.requirements
    dtype, size = _SHORT[asked.dtype], asked.head_size
    return (
        f"dtype_q_{dtype}_dtype_kv_{_SHORT[agreement.kv_cache_dtype]}_dtype_o_{dtype}_dtype_idx_i32_"
        f"head_dim_qk_{size}_head_dim_vo_{size}_posenc_0_"
        f"use_swa_{asked.sliding_window is not None}_use_logits_cap_{asked.logits_soft_cap is not None}"
    )


def _folder() -> Path | None:
    """Return where the library looks for modules that need no compiling (its ``FLASHINFER_AOT_DIR``)."""
    for package, place in (("flashinfer_jit_cache", ("jit_cache",)), ("flashinfer", ("data", "aot"))):
        spec = find_spec(package)
        if spec is not None and spec.origin:
            return Path(spec.origin).parent.joinpath(*place)
    return None
