"""Completes a layer from the agreement, and refuses what was not negotiated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract.guards._format import describe, dtype_name
from attnplug.contract.guards.scales import NORMAL_FLOAT32, complete_scales, is_normal_float32
from attnplug.contract.inputs.kv_cache import TORCH_DTYPES
from attnplug.errors import LayerError, NotNegotiatedError, TensorError, shown
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from torch import Tensor

    from attnplug.contract.inputs.layer import Layer
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.requirements import Requirements

_INHERITED: Final = tuple(item.name for item in FIELDS.values() if item.in_layer)

_WITHOUT_EFFECT: Final = {
    "sinks": "a head without a sink has a large negative one, such as -1e4",
    "alibi_slopes": "a head without ALiBi has the slope 0",
}


def complete_layer(layer: Layer, agreement: Agreement, device: torch.device, static_scales: AbstractSet[str]) -> Layer:
    """
    Return the layer with every value that the agreement knows.

    Args:
        layer: As the host gave it.
        agreement: What was negotiated.
        device: The backend's device; only its type is compared.
        static_scales: Which of ``"q"``, ``"k"``, ``"v"`` the implementation scales by the layer's scales.

    Raises:
        NotNegotiatedError: The layer has what was not requested.
        LayerError: The layer lacks a tensor that was requested, or a value is wrong in itself.
        TensorError: A tensor has the wrong shape, dtype or device.
    """
    requested = agreement.requirements
    _check_name(layer)
    inherited = {name: _inherit(layer, name, getattr(requested, name)) for name in _INHERITED}
    check_extra(f"layer {layer.name!r}", layer.extra, agreement)
    _check_sharing(layer, requested)
    _check_learned(layer, requested, device)
    _check_output_scales(layer, requested, device)
    if layer.sinks_with_call:  # a tensor all the same, so that no implementation has to expect a layer without one
        inherited["sinks"] = torch.zeros(requested.num_q_heads, dtype=torch.float32, device=device)
    return evolve(
        layer, **inherited, scale=_scale(layer, requested), **complete_scales(layer, agreement, device, static_scales)
    )


def check_extra(what: str, extra: Mapping[str, object], agreement: Agreement) -> None:
    """
    Check that there are values of requested open features only.

    Raises:
        NotNegotiatedError: Another one does.
    """
    for name in extra:
        if name not in agreement.requirements.features:
            raise NotNegotiatedError(
                f"{what} with extra {name!r} was given",
                f"features={agreement.requirements.features} were negotiated",
                f"select again with features=({name!r},) in the requirements, or leave it out",
            )


def check_tensor(
    layer: Layer,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """
    Check one tensor of a layer. Reading its values waits for the device, once, when the layer is made.

    Raises:
        TensorError: Shape, dtype or device differ.
        LayerError: A value is not finite.
    """
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device.type != device.type:
        raise TensorError(
            f"layer {layer.name!r} has {name} of {describe(tensor)}",
            f"{name} is {shape} {' or '.join(map(dtype_name, dtypes))} on {device.type}",
            f"pass this rank's part, as {name}.to(device={device.type!r}, dtype=torch.{dtype_name(dtypes[0])})",
        )
    if not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
        raise LayerError(
            f"layer {layer.name!r} has {name} with values that are not finite",
            "kernels differ in what they make of infinities, so all values are finite",
            f"check that the weights are loaded; {_WITHOUT_EFFECT.get(name, 'pass finite values')}",
        )


def _check_name(layer: Layer) -> None:
    if not isinstance(layer.name, str) or not layer.name:
        raise LayerError(
            f"a layer named {layer.name!r} was given",
            "a layer has a name, unique in its model",
            "pass name='layers.0' or the like",
        )


def _inherit(layer: Layer, name: str, agreed: Any) -> Any:
    given = getattr(layer, name)
    if given is None or given == agreed:
        return agreed
    requested = f"{name}={agreed!r} was negotiated" if agreed is not None else f"{name} was not requested"
    raise NotNegotiatedError(
        f"layer {layer.name!r} has {name}={shown(given)}",
        requested,
        f"select again with {name}={shown(given)} in the requirements of this layer, or leave {name} out of the layer",
    )


def _scale(layer: Layer, requested: Requirements) -> float:
    if layer.scale is None and requested.latent:
        raise LayerError(
            f"layer {layer.name!r} has no scale",
            "the scale of latent attention is that of its keys before they were absorbed, which no size here says",
            "pass Layer(scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5), times the square of YaRN's mscale",
        )
    if layer.scale is None:
        return float(requested.head_size**-0.5)
    if not is_normal_float32(layer.scale):
        raise LayerError(
            f"layer {layer.name!r} has scale={shown(layer.scale)}",
            f"{NORMAL_FLOAT32}, and a Python number",
            f"leave it out for head_size ** -0.5 = {requested.head_size**-0.5:.6g}",
        )
    return float(layer.scale)


def _check_sharing(layer: Layer, requested: Requirements) -> None:
    target = layer.kv_sharing_target
    if target is None:
        return
    if not requested.kv_sharing:
        raise NotNegotiatedError(
            f"layer {layer.name!r} reads the cache of {target!r}",
            "kv_sharing was not requested",
            "select again with kv_sharing=True in the requirements of this layer, or leave kv_sharing_target out",
        )
    if target == layer.name:
        raise LayerError(
            f"layer {layer.name!r} shares the cache of itself",
            "a layer shares the cache of an earlier layer",
            "leave kv_sharing_target out",
        )


def _check_learned(layer: Layer, requested: Requirements, device: torch.device) -> None:
    heads = (requested.num_q_heads,)
    if layer.sinks_with_call:
        _check_sinks_with_call(layer, requested)
    else:
        sinks = _expected(layer, "sinks", "sinks", "sinks=True", requested=requested.sinks)
        if sinks is not None:
            _check_sinks(layer, sinks, requested, device)
    slopes = _expected(layer, "alibi_slopes", "alibi", "alibi='linear'", requested=requested.alibi is not None)
    if slopes is not None:
        check_tensor(layer, "alibi_slopes", slopes, heads, (torch.float32,), device)


def check_call_sinks(layer: Layer, sinks: Tensor | None, agreement: Agreement, device: torch.device) -> Layer:
    """
    Return the layer with the sinks of a call, checked as those of a layer are. Reading them waits for the device.

    Raises:
        NotNegotiatedError: Sinks are given, and the layer takes none with a call.
        LayerError: Sinks are absent, or a value is not finite.
        TensorError: They have the wrong shape, dtype or device.
    """
    if not layer.sinks_with_call:
        raise NotNegotiatedError(
            f"layer {layer.name!r} was given sinks with a call",
            "its sinks were set in make_impl" if layer.sinks is not None else "sinks was not requested",
            "leave them out of the call, or make the layer with Layer(sinks_with_call=True) and sinks=True requested",
        )
    if sinks is None:
        raise LayerError(
            f"layer {layer.name!r} was called without sinks",
            "it was made with sinks_with_call=True: every call has them",
            "pass sinks=..., or make the layer with Layer(sinks=...)",
        )
    _check_sinks(layer, sinks, agreement.requirements, device)
    return evolve(layer, sinks=sinks)


def _check_sinks(layer: Layer, sinks: Tensor, requested: Requirements, device: torch.device) -> None:
    dtypes = dict.fromkeys((torch.float32, TORCH_DTYPES[requested.dtype]))
    check_tensor(layer, "sinks", sinks, (requested.num_q_heads,), tuple(dtypes), device)


def _check_sinks_with_call(layer: Layer, requested: Requirements) -> None:
    if not requested.sinks:
        raise NotNegotiatedError(
            f"layer {layer.name!r} has sinks_with_call=True",
            "sinks was not requested, so the chosen backend may not support it",
            "select again with sinks=True in the requirements of this layer, or leave sinks_with_call out",
        )
    if layer.sinks is not None:
        raise LayerError(
            f"layer {layer.name!r} has sinks_with_call=True and sinks of {describe(layer.sinks)}",
            "the sinks belong to the layer, or come with each call",
            "pass one of them",
        )


def _check_output_scales(layer: Layer, requested: Requirements, device: torch.device) -> None:
    quantized = requested.output_quant is not None
    scale = _expected(layer, "output_scale", "output_quant", "output_quant='fp8_e4m3'", requested=quantized)
    if scale is not None:
        shape = () if scale.ndim == 0 else (1,)
        check_tensor(layer, "output_scale", scale, shape, (torch.float32,), device)
        if not scale.is_meta and not is_normal_float32(float(scale)):
            raise LayerError(
                f"layer {layer.name!r} has output_scale={float(scale)!r}",
                NORMAL_FLOAT32,
                "check the checkpoint's scales",
            )
    if layer.output_block_scale is not None and not quantized:
        _refuse_unrequested(layer, "output_block_scale", "output_quant", "output_quant='nvfp4'")


def _expected(layer: Any, name: str, requirement: str, example: str, *, requested: bool) -> Tensor | None:
    """Return the tensor that was requested, None where none was; refuses one without the other."""
    given = getattr(layer, name)
    if given is not None and not requested:
        _refuse_unrequested(layer, name, requirement, example)
    if requested and given is None:
        raise LayerError(
            f"layer {layer.name!r} has no {name}",
            f"{requirement} was requested, and every layer of the agreement has its {name}",
            f"pass Layer({name}=...), or select again without {requirement} for this layer",
        )
    return given  # type: ignore[no-any-return]


def _refuse_unrequested(layer: Layer, name: str, requirement: str, example: str) -> None:
    raise NotNegotiatedError(
        f"layer {layer.name!r} has {name} of {describe(getattr(layer, name))}",
        f"{requirement} was not requested, so the chosen backend may not support it",
        f"select again with {example} in the requirements of this layer, or leave {name} out of the layer",
    )
