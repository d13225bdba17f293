"""Completes a layer's quantization scales: a host float and a device tensor of each that is applied."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.contract.guards.wording import describe
from attnplug.errors import LayerError, NotNegotiatedError, TensorError

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from torch import Tensor

    from attnplug.contract.layer import Layer
    from attnplug.negotiation.agreement import Agreement

UNQUANTIZED: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Cache dtypes that take no scale."""


def complete_scales(
    layer: Layer, agreement: Agreement, device: torch.device, static_scales: AbstractSet[str]
) -> dict[str, Any]:
    """
    Return the layer's six scale fields.

    A scale that nothing applies is 1.0 without a tensor. Otherwise the host float and the tensor follow from each
    other; per-head scales are tensors alone.

    Raises:
        NotNegotiatedError: A scale other than 1 is given, and nothing would apply it.
        LayerError: A scale is not positive and finite, or float and tensor differ.
        TensorError: A scale tensor has the wrong shape, dtype or device.
    """
    applied = frozenset() if agreement.kv_cache_dtype in UNQUANTIZED else static_scales
    completed: dict[str, Any] = {}
    for letter in "qkv":
        name = f"{letter}_scale"
        host, tensor = (
            _complete(layer, name, agreement, device) if letter in applied else _refuse_effect(layer, name, agreement)
        )
        completed[name], completed[f"{name}_tensor"] = host, tensor
    return completed


def _refuse_effect(layer: Layer, name: str, agreement: Agreement) -> tuple[float, None]:
    host, tensor = getattr(layer, name), getattr(layer, f"{name}_tensor")
    if tensor is None and host in (None, 1.0):
        return 1.0, None
    given = f"{name}={host!r}" if tensor is None else f"{name}_tensor of {describe(tensor)}"
    if agreement.kv_cache_dtype in UNQUANTIZED:
        allowed = f"a {agreement.kv_cache_dtype} cache was negotiated, which takes no scales"
        remedy = f"select again with a quantized kv_cache_dtype such as 'fp8_e4m3', or leave {name} out of the layer"
    else:
        allowed = f"{agreement.id} applies no static {name} to a {agreement.kv_cache_dtype} cache"
        remedy = f"leave {name} out of the layer, or choose a backend that applies it"
    raise NotNegotiatedError(f"layer {layer.name!r} has {given}", allowed, remedy)


def _complete(layer: Layer, name: str, agreement: Agreement, device: torch.device) -> tuple[float | None, Tensor]:
    host, tensor = getattr(layer, name), getattr(layer, f"{name}_tensor")
    if host is not None and not (isinstance(host, (int, float)) and isfinite(host) and host > 0):
        raise LayerError(
            f"layer {layer.name!r} has {name}={host!r}",
            "a scale is a positive finite number",
            "check the checkpoint's scales",
        )
    if tensor is None:
        host = 1.0 if host is None else float(host)
        return host, torch.full((1,), host, dtype=torch.float32, device=device)
    heads = _check_shape(layer, name, tensor, agreement, device)
    if tensor.is_meta:
        return host, tensor
    values = tensor.flatten().tolist()
    if not all(isfinite(value) and value > 0 for value in values):
        raise LayerError(
            f"layer {layer.name!r} has {name}_tensor={values}",
            "a scale is a positive finite number",
            "check the checkpoint's scales",
        )
    if heads:
        _refuse_host_float(layer, name, host)
        return None, tensor
    if host is not None and abs(host - values[0]) > 1e-6 * abs(values[0]):
        raise LayerError(
            f"layer {layer.name!r} has {name}={host!r} and {name}_tensor={values[0]!r}",
            "both are the same scale, once for the host and once for the device",
            "pass one of them; the other follows",
        )
    return values[0], tensor


def _check_shape(layer: Layer, name: str, tensor: Tensor, agreement: Agreement, device: torch.device) -> bool:
    """Whether the tensor holds a scale per head."""
    asked = agreement.requirements
    heads = asked.num_q_heads if name == "q_scale" else asked.num_kv_heads
    shapes = ((heads,),) if asked.per_head_scales else ((), (1,))
    if tuple(tensor.shape) in shapes and tensor.dtype == torch.float32 and tensor.device.type == device.type:
        return asked.per_head_scales
    raise TensorError(
        f"layer {layer.name!r} has {name}_tensor of {describe(tensor)}",
        f"with per_head_scales={asked.per_head_scales}, it is {' or '.join(map(str, shapes))} float32 on {device.type}",
        f"reshape it, or select again with per_head_scales={not asked.per_head_scales}",
    )


def _refuse_host_float(layer: Layer, name: str, host: float | None) -> None:
    if host is not None:
        raise LayerError(
            f"layer {layer.name!r} has {name}={host!r} beside a scale per head",
            "scales per head are tensors; one host float cannot stand for them",
            f"leave {name} out of the layer",
        )
