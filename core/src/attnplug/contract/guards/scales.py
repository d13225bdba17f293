"""Completes a layer's quantization scales: a host float and a device tensor of each that is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract.guards._format import describe
from attnplug.errors import LayerError, NotNegotiatedError, TensorError, shown
from attnplug.request.domains import FP8_DS_MLA, PER_TOKEN_HEAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from torch import Tensor

    from attnplug.contract.inputs.layer import Layer
    from attnplug.negotiation.agreement import Agreement

_LARGEST: Final = float(torch.finfo(torch.float32).max)
NORMAL_FLOAT32: Final = "a scale is a positive finite number, normal in float32: from 2**-126 to 3.4e38"

SCALELESS: Final = frozenset({"float64", "float32", "bfloat16", "float16", FP8_DS_MLA, *PER_TOKEN_HEAD})
"""Layers with a KV cache of these dtypes have no scales: it is not quantized, or cache writes compute its scales."""


def complete_scales(
    layer: Layer,
    agreement: Agreement,
    device: torch.device,
    static_scales: AbstractSet[str],
    letters: Iterable[str] = "qkv",
) -> dict[str, Any]:
    """
    Return the layer's scale fields: all six, or those of some letters.

    A scale that nothing applies is 1.0 without a tensor. Otherwise the host float and the tensor follow from each
    other; per-head scales are tensors alone.

    Raises:
        NotNegotiatedError: A scale other than 1 is given, and nothing would apply it.
        LayerError: A scale is not positive and finite, or float and tensor differ.
        TensorError: A scale tensor has the wrong shape, dtype or device.
    """
    applied = frozenset() if agreement.kv_cache_dtype in SCALELESS else static_scales
    completed: dict[str, Any] = {}
    if agreement.requirements.latent and {"k", "v"} & set(letters):  # a value is a part of its key
        layer, letters = _with_key_scales(layer), dict.fromkeys((*letters, "k", "v"))
    for letter in letters:
        name = f"{letter}_scale"
        host, tensor = (
            _complete(layer, name, agreement, device) if letter in applied else _refuse_effect(layer, name, agreement)
        )
        completed[name], completed[f"{name}_tensor"] = host, tensor
    return completed


def _with_key_scales(layer: Layer) -> Layer:
    """Return the layer with the scale of its keys as the scale of its values."""
    is_given = layer.v_scale is not None or layer.v_scale_tensor is not None
    if is_given and (layer.v_scale != layer.k_scale or layer.v_scale_tensor is not layer.k_scale_tensor):
        raise LayerError(
            f"layer {layer.name!r} has k_scale={layer.k_scale!r} and v_scale={layer.v_scale!r}",
            "the values of latents are parts of their keys, and have their scale",
            "leave v_scale out",
        )
    return evolve(layer, v_scale=layer.k_scale, v_scale_tensor=layer.k_scale_tensor)


def replace_scales(
    layer: Layer,
    given: Mapping[str, Any],
    agreement: Agreement,
    device: torch.device,
    static_scales: AbstractSet[str],
) -> Layer:
    """
    Return a completed layer with other scales. A scale of which nothing is given stays; float and tensor of one follow
    from each other, as in a new layer.

    Args:
        layer: The completed layer.
        given: Values of the layer's six scale fields; None for those that are not given.
        agreement: What was negotiated.
        device: The backend's device.
        static_scales: Which scales the implementation applies.

    Raises:
        ContractError: As for `complete_scales`.
    """
    letters = [one for one in "qkv" if given[f"{one}_scale"] is not None or given[f"{one}_scale_tensor"] is not None]
    fields = {name: given[name] for one in letters for name in (f"{one}_scale", f"{one}_scale_tensor")}
    if agreement.requirements.latent and "v" not in letters:
        fields |= {"v_scale": None, "v_scale_tensor": None}
    changed = evolve(layer, **fields)
    return evolve(changed, **complete_scales(changed, agreement, device, static_scales, letters))


def _refuse_effect(layer: Layer, name: str, agreement: Agreement) -> tuple[float, None]:
    host, tensor = getattr(layer, name), getattr(layer, f"{name}_tensor")
    if tensor is None and host in (None, 1.0):
        return 1.0, None
    given = f"{name}={shown(host)}" if tensor is None else f"{name}_tensor of {describe(tensor)}"
    if agreement.kv_cache_dtype == FP8_DS_MLA:
        allowed = f"a {FP8_DS_MLA} cache was negotiated, whose records hold their own scales"
        fix = f"leave {name} out of the layer"
    elif agreement.kv_cache_dtype in PER_TOKEN_HEAD:
        allowed = f"a {agreement.kv_cache_dtype} cache was negotiated, whose scales each cache write computes"
        fix = f"leave {name} out of the layer"
    elif agreement.kv_cache_dtype in SCALELESS:
        allowed = f"a {agreement.kv_cache_dtype} cache was negotiated, which takes no scales"
        fix = f"select again with a quantized kv_cache_dtype such as 'fp8_e4m3', or leave {name} out of the layer"
    else:
        allowed = f"{agreement.id} applies no static {name} to a {agreement.kv_cache_dtype} cache"
        fix = f"leave {name} out of the layer, or choose a backend that applies it"
    raise NotNegotiatedError(f"layer {layer.name!r} has {given}", allowed, fix)


def _complete(layer: Layer, name: str, agreement: Agreement, device: torch.device) -> tuple[float | None, Tensor]:
    host, tensor = getattr(layer, name), getattr(layer, f"{name}_tensor")
    if agreement.requirements.per_head_scales:
        return None, _per_head(layer, name, host, tensor, agreement, device)
    if host is not None:
        _check_positive(layer, name, [host])
    if tensor is None:
        host = 1.0 if host is None else float(host)
        return host, torch.full((1,), host, dtype=torch.float32, device=device)
    _check_form(layer, f"{name}_tensor", tensor, ((1,), ()), agreement, device)
    if tensor.is_meta:
        return host, tensor
    value = float(tensor)
    _check_positive(layer, f"{name}_tensor", [value])
    if host is not None and abs(host - value) > 1e-6 * value:
        raise LayerError(
            f"layer {layer.name!r} has {name}={host!r} and {name}_tensor={value!r}",
            "both are the same scale, once for the host and once for the device",
            "pass one of them; the other follows",
        )
    return value, tensor


def _per_head(
    layer: Layer, name: str, host: float | None, tensor: Tensor | None, agreement: Agreement, device: torch.device
) -> Tensor:
    heads = agreement.requirements.num_kv_heads  # queries too: kernels take one scale per group of query heads
    if tensor is None or host is not None:
        raise LayerError(
            f"layer {layer.name!r} has {name}={host!r} and " + ("no tensor" if tensor is None else "a tensor too"),
            "per_head_scales was requested, and one host float cannot replace the scales of all heads",
            f"pass {name}_tensor of ({heads},) alone, or select again with per_head_scales=False",
        )
    _check_form(layer, f"{name}_tensor", tensor, ((heads,),), agreement, device)
    if not tensor.is_meta:
        _check_positive(layer, f"{name}_tensor", tensor.tolist())
    return tensor


def is_normal_float32(value: object) -> bool:
    """Whether a value is a positive number that float32, in which kernels scale, holds with all of its digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 2.0**-126 <= value <= _LARGEST


def _check_positive(layer: Layer, name: str, values: list[float]) -> None:
    for value in values:
        if not is_normal_float32(value):
            raise LayerError(
                f"layer {layer.name!r} has {name}={shown(value)}", NORMAL_FLOAT32, "check the checkpoint's scales"
            )


def _check_form(
    layer: Layer,
    name: str,
    tensor: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    agreement: Agreement,
    device: torch.device,
) -> None:
    if tuple(tensor.shape) in shapes and tensor.dtype == torch.float32 and tensor.device.type == device.type:
        return
    per_head = agreement.requirements.per_head_scales
    raise TensorError(
        f"layer {layer.name!r} has {name} of {describe(tensor)}",
        f"with per_head_scales={per_head}, it is {' or '.join(map(str, shapes))} float32 on {device.type}",
        f"reshape it, or select again with per_head_scales={not per_head}",
    )
