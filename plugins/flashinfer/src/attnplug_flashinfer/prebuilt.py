"""The compiled modules of the library that an agreement uses, and which of them are not installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug_flashinfer.routes import kernels_of, kind_of_profile, kinds_of_steps

if TYPE_CHECKING:
    from attnplug import Agreement, Device

_SHORT: Final = {"bfloat16": "bf16", "float16": "f16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def missing_modules(agreement: Agreement, device: Device) -> tuple[str, ...]:
    """Return the names of the modules that have to be compiled here. The library's wheel contains none."""
    folder = _folder()
    needed = needed_modules(agreement, device)
    return tuple(name for name in needed if folder is None or not (folder / name / f"{name}.so").is_file())


def needed_modules(agreement: Agreement, device: Device) -> tuple[str, ...]:
    """
    Return the names of the modules that the steps and a profiling run of an agreement load, each once.

    The names are those of the library's releases 0.6.8 to 0.7.2: ``get_batch_prefill_uri``, ``get_batch_decode_uri``
    and ``get_batch_mla_uri`` in its ``jit/attention/modules.py``, two of which have other endings since 0.7. A module
    with attention sinks is named by its wrapper, and here by its head size too. The library distributes none of these
    compiled.

    Args:
        agreement: The agreement.
        device: The device that the kernels run on.
    """
    kinds = (*kinds_of_steps(agreement), kind_of_profile(agreement))
    names = [_module(kind, kernels_of(kind, agreement, device), agreement) for kind in kinds]
    if agreement.requirements.cascade:
        names.append("cascade")
    return tuple(dict.fromkeys(names))


def _module(kind: str, kernels: str, agreement: Agreement) -> str:
    """Return the module of a kind of wrapper and its kernels."""
    required = agreement.requirements
    dtype, size, window = _SHORT[required.dtype], required.head_size, required.sliding_window is not None
    size_v: int = required.head_size_v or size
    if required.latent:
        cache = _SHORT[agreement.kv_cache_dtype]
        form = f"dtype_q_{dtype}_dtype_kv_{cache}_dtype_o_{dtype}_dtype_idx_i32_head_dim_ckv_{size_v}"
        ending = ("_planabi2" if _is_newer() else "") + ("_sm90" if kernels == "fa3" else "")
        return f"batch_mla_attention_{form}_head_dim_kpe_{size - size_v}_profiler_False{ending}"
    if required.sinks:
        return f"batch_prefill_attention_sink_{dtype}_swa_{window}_{kernels}_head_{size}_{size}"
    cache = dtype if kind == "ragged" else _SHORT[agreement.kv_cache_dtype]  # contiguous K/V are not quantized
    form = (
        f"dtype_q_{dtype}_dtype_kv_{cache}_dtype_o_{dtype}_dtype_idx_i32_head_dim_qk_{size}_head_dim_vo_{size_v}_"
        f"posenc_0_use_swa_{window}_use_logits_cap_{required.logits_soft_cap is not None}"
    )
    if kernels == "cuda_cores":
        return f"batch_decode_with_kv_cache_{form}"
    ending = "_sm90" if kernels == "fa3" else "_kv_stride_equal" if _is_newer() else ""
    return f"batch_prefill_with_kv_cache_{form}_f16qk_False{ending}"


def _is_newer() -> bool:
    """Whether the library is 0.7 or newer."""
    installed = installed_version("flashinfer-python")
    return installed is not None and tuple(map(int, re.findall(r"\d+", installed)[:2])) >= (0, 7)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _folder() -> Path | None:
    """Return the folder in which the library looks for compiled modules (its ``FLASHINFER_AOT_DIR``)."""
    for package, place in (("flashinfer_jit_cache", ("jit_cache",)), ("flashinfer", ("data", "aot"))):
        spec = find_spec(package)
        if spec is not None and spec.origin:
            return Path(spec.origin).parent.joinpath(*place)
    return None
