"""The KV cache that the configuration of a quantized checkpoint names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import RequirementsError
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
_TYPES: Final = {
    ("float", 8, "e4m3"): "fp8_e4m3",
    ("float", 8, "e5m2"): "fp8_e5m2",
    ("float", 4, "e2m1"): "nvfp4",
    ("int", 8, ""): "int8",
    ("int", 4, ""): "int4",
}
_FORMATS: Final = {("float", 8): "e4m3", ("float", 4): "e2m1"}
_NAMES: Final = {
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8",
    "nvfp4": "nvfp4",
    "static": "fp8_e4m3",  # AutoFP8 names how scales are made; its KV cache is always FP8
}
_NO_CACHE: Final = frozenset({"", "none", "auto", "no_quant"})
_PER_HEAD: Final = "attn_head"
_PER_TENSOR: Final = ("tensor", "per_tensor")
_BLOCKS: Final = "tensor_group"  # of NVFP4, whose blocks are part of the dtype


@frozen
class CacheScheme:
    """
    The KV cache that a checkpoint was made for.

    Attributes:
        dtype: Its dtype; None where the checkpoint names a form that no requirements express.
        per_head_scales: Whether each KV head has scales, or all share one of keys and one of values.
        form: How the checkpoint names it, for messages.
    """

    dtype: str | None
    per_head_scales: bool
    form: str

    def request(self, origin: str) -> dict[str, Any]:
        """
        Return the fields of `Requirements`.

        Args:
            origin: What was read, for messages.

        Raises:
            RequirementsError: No requirements express this KV cache.
        """
        if self.dtype is None:
            raise RequirementsError(
                f"{origin} was quantized for a KV cache with {self.form}",
                "expected FP8, int8, int4 or NVFP4 with static, symmetric scales per tensor or per KV head",
                "pass kv_cache_dtype='auto' for a KV cache in the model's dtype, on the command line"
                " --kv-cache-dtype auto",
            )
        return {"kv_cache_dtype": self.dtype} | ({"per_head_scales": True} if self.per_head_scales else {})

    def is_of(self, requested: object) -> bool:
        """Whether a caller's KV cache dtype is this one; None leaves it to the checkpoint."""
        return requested is None or _NAMES.get(str(requested), requested) == self.dtype


def cache_scheme(*parts: Fields) -> CacheScheme | None:
    """
    Return the KV cache that a checkpoint was made for, None where it names none.

    Sources: compressed-tensors' `QuantizationConfig.kv_cache_scheme` and its `QuantizationArgs`, AutoFP8's
    `kv_cache_scheme`, ModelOpt's `kv_cache_quant_algo` and ``hf_quant_config.json``, Quark's `kv_cache_quant_config`
    and, in files from before that field, `export.kv_cache_group` with `layer_quant_config`.

    Args:
        parts: The whole configuration, and its text part.
    """
    return next((found for found in map(_cache_scheme, _configs(parts)) if found is not None), None)


def _cache_scheme(config: Mapping[str, Any]) -> CacheScheme | None:
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return _of_scheme(scheme)
    inner = config.get("quantization")
    for field, value in (
        ("kv_cache_scheme", scheme),
        ("kv_cache_quant_algo", config.get("kv_cache_quant_algo")),
        ("kv_cache_quant_algo", inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None),
    ):
        if value is not None and str(value).lower() not in _NO_CACHE:
            return CacheScheme(_NAMES.get(str(value).lower()), per_head_scales=False, form=f"{field}={value!r}")
    return _of_quark(config)


def _of_scheme(scheme: Mapping[str, Any]) -> CacheScheme:
    """Read the arguments of compressed-tensors, of which ModelOpt writes the first three."""
    kind, strategy = str(scheme.get("type")), scheme.get("strategy")
    bits = found if isinstance(found := scheme.get("num_bits"), int) else 0
    layout = str(scheme.get("format") or _FORMATS.get((kind, bits), "")).removesuffix("fn")
    dtype = _TYPES.get((kind, bits, layout))
    per_head = strategy == _PER_HEAD
    is_known = per_head or strategy in (None, *_PER_TENSOR) or (strategy == _BLOCKS and dtype == "nvfp4")
    is_static = not scheme.get("dynamic") or dtype == "nvfp4"  # the scales of its blocks are always computed
    is_symmetric = scheme.get("symmetric") is not False
    named = ("num_bits", "type", "format", "strategy", "dynamic", "symmetric")
    form = ", ".join(f"{name}={scheme[name]!r}" for name in named if scheme.get(name) is not None)
    return CacheScheme(
        dtype if is_known and is_static and is_symmetric else None, per_head, f"kv_cache_scheme ({form})"
    )


def _of_quark(config: Mapping[str, Any]) -> CacheScheme | None:
    """Read the outputs of the projections of keys and values, which Quark quantizes for the KV cache."""
    layers, export = config.get("kv_cache_quant_config"), config.get("export")
    if not layers and isinstance(export, Mapping) and export.get("kv_cache_group"):
        found = config.get("layer_quant_config")
        given: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        layers = {name: given.get(name) or {} for name in export["kv_cache_group"]}
    if not isinstance(layers, Mapping) or not layers:
        return None
    outputs = [layer.get("output_tensors") or {} for layer in layers.values() if isinstance(layer, Mapping)]
    found = {(str(each.get("dtype", "fp8_e4m3")), str(each.get("qscheme", "per_tensor"))) for each in outputs}
    is_static = not any(each.get("is_dynamic") for each in outputs)
    names = {_NAMES.get(dtype) for dtype, scheme in found if scheme in _PER_TENSOR and is_static}
    form = " and ".join(f"dtype={dtype!r}, qscheme={scheme!r}" for dtype, scheme in sorted(found))
    dtype = names.pop() if len(found) == len(names) == 1 else None
    return CacheScheme(dtype, per_head_scales=False, form=f"output_tensors of {form}{'' if is_static else ', dynamic'}")


def notes(parts: tuple[Fields, ...], requested: str | None, *, paged: bool) -> Iterator[str]:
    """
    Yield the effects of the quantization on attention's request.

    Args:
        parts: The whole configuration, and its text part.
        requested: The KV cache dtype that the caller names; None leaves it to the checkpoint.
        paged: Whether there is a KV cache.
    """
    scheme = cache_scheme(*parts)
    found = None if scheme is None else scheme.dtype or scheme.form
    for config in _configs(parts):
        inner = config.get("quantization")
        method = config.get("quant_method") or config.get("quant_algo")
        method = method or (inner.get("quant_algo") if isinstance(inner, Mapping) else None) or "unnamed"
        what = _METHODS.get(str(method).lower(), "weights")
        changed = "nothing else about attention" if found else "nothing about attention"
        yield f"quantization {method} ({what}) changes {changed}"
        break
    if scheme is None:
        return
    if not paged:
        yield f"kv_cache_dtype={found} of the checkpoint is for a paged KV cache, and K/V are contiguous here"
    elif not scheme.is_of(requested):
        yield f"kv_cache_dtype={requested} is requested in place of {found}, which the checkpoint names"
    else:
        scales = "scales per KV head" if scheme.per_head_scales else "a scale per tensor"
        yield f"kv_cache_dtype={found} is requested: the checkpoint names it for its KV cache, with {scales}"


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
