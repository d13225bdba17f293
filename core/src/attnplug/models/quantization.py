"""The dtype of the KV cache that the configuration of a quantized checkpoint names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attnplug.request.files import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from attnplug.models.fields import Fields

_WEIGHTS_ONLY: Final = "weights alone: query, key and value have the model's dtype"
_METHODS: Final = {
    "awq": "4-bit weights, whose kernels multiply float16 or bfloat16 activations",
    "bitsandbytes": _WEIGHTS_ONLY,
    "compressed-tensors": "weights, and activations of linear layers",
    "fbgemm_fp8": "FP8 weights and activations of linear layers",
    "fp8": "FP8 weights and activations of linear layers",
    "gptq": _WEIGHTS_ONLY,
    "modelopt": "weights, and activations of linear layers",
    "mxfp4": "the experts' weights alone",
    "quark": "weights, and activations of linear layers",
}
_LARGEST: Final = 2**22  # bytes; a list of layers may be long
_FLOAT8: Final = {"e4m3": "fp8_e4m3", "e4m3fn": "fp8_e4m3", "e5m2": "fp8_e5m2"}
_NAMES: Final = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int8": "int8", "nvfp4": "nvfp4"}


def cache_dtype(*parts: Fields) -> str | None:
    """
    Return the dtype that a checkpoint was made to have its KV cache in, None where it names none.

    Sources: compressed-tensors' `QuantizationConfig.kv_cache_scheme`, ModelOpt's `kv_cache_quant_algo` and
    ``hf_quant_config.json``, Quark's `kv_cache_quant_config`.

    Args:
        parts: The whole configuration, and its text part.
    """
    return next((found for found in map(_cache_dtype, _configs(parts)) if found is not None), None)


def _cache_dtype(config: Mapping[str, Any]) -> str | None:
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return _of_scheme(scheme)
    inner = config.get("quantization")
    named = scheme or config.get("kv_cache_quant_algo")
    named = named or (inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None)
    if named:
        return _NAMES.get(str(named).lower(), _unknown(str(named)))
    return "fp8_e4m3" if config.get("kv_cache_quant_config") else None  # the only one that Quark exports


def notes(parts: tuple[Fields, ...], requested: str | None, *, paged: bool) -> Iterator[str]:
    """
    Yield the effects of the quantization on attention's request.

    Args:
        parts: The whole configuration, and its text part.
        requested: The KV cache dtype that the caller names; None leaves it to the checkpoint.
        paged: Whether there is a KV cache.
    """
    found = cache_dtype(*parts)
    for config in _configs(parts):
        inner = config.get("quantization")
        method = config.get("quant_method") or config.get("quant_algo")
        method = method or (inner.get("quant_algo") if isinstance(inner, Mapping) else None) or "unnamed"
        what = _METHODS.get(str(method).lower(), "weights")
        changed = "nothing else that attention requests" if found else "nothing that attention requests"
        yield f"quantization {method} ({what}) changes {changed}"
        break
    if found is None:
        return
    if not paged:
        yield f"kv_cache_dtype={found} of the checkpoint is for a paged KV cache, and K/V are contiguous here"
    elif requested not in (None, found):
        yield f"kv_cache_dtype={requested} is requested in place of {found}, which the checkpoint names"
    else:
        yield f"kv_cache_dtype={found} is requested: the checkpoint's quantization names it for its KV cache"


def _unknown(name: str) -> str:
    """Return a dtype that no backend declares, so that each refuses it by name."""
    return f"checkpoint.{re.sub('[^a-z0-9_]', '_', name.lower())}"


def _of_scheme(scheme: Mapping[str, Any]) -> str | None:
    bits, kind = scheme.get("num_bits"), str(scheme.get("type"))
    if kind == "float" and bits == 8:
        return _FLOAT8.get(str(scheme.get("format", "e4m3")), "fp8_e4m3")
    return f"{kind}{bits}" if kind == "int" and bits in (4, 8) else _unknown(f"{kind}{bits}")


def _configs(parts: tuple[Fields, ...]) -> Iterator[Mapping[str, Any]]:
    """Yield the quantization of the whole or of the text part, then the quantization of ModelOpt's file beside it."""
    for part in parts:
        found = part.data.get("quantization_config") or part.data.get("compression_config")
        if isinstance(found, Mapping):
            yield found
            break
    if parts[0].file is not None:
        yield from _beside(parts[0].file.with_name("hf_quant_config.json"))


def _beside(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        found = json.loads(read_text(file, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(found, dict):
        yield found
