"""A layer of SGLang in attnplug's words, and the kinds of layers that no backend is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug import Layer, Requirements
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_SINKS: Final = ("sinks", "attention_sink_bias")
"""Attributes of the module around an attention layer, whose tensor it passes with each call as ``sinks=``."""

OWN: Final = "serve this model with one of SGLang's own backends, such as --attention-backend triton"


@frozen(eq=False)
class HostLayer:
    """
    A `RadixAttention` of a model.

    Attributes:
        name: Its path in the model.
        module: The layer.
        has_sinks: Whether the module around it has sinks, which it passes with each call.
        latent: Whether it attends to latents, with absorbed queries.
    """

    name: str
    module: Any
    has_sinks: bool
    latent: bool = False


def layers_of(model: nn.Module) -> tuple[HostLayer, ...]:
    """
    Return the attention layers of a model, in the model's order; nothing of a model that has no modules yet.

    Raises:
        NotNegotiatedError: It has no such layer, or one with what the contract has no word for.
    """
    found = tuple(_layers_in(model))
    if not found and (model.state_dict() or any(True for _ in model.children())):
        raise NotNegotiatedError(
            f"{type(model).__name__} has no RadixAttention", "attnplug serves the layers that SGLang calls by it", OWN
        )
    for layer in found:
        check_layer(layer)
    return found


def check_layer(layer: HostLayer) -> None:
    """
    Check that a layer has nothing that the contract has no word for.

    Raises:
        NotNegotiatedError: It has.
    """
    for reason in reasons(layer.module):
        raise NotNegotiatedError(f"the layer {layer.name!r} has {reason}", "attnplug does not serve it", OWN)


def _layers_in(model: nn.Module) -> Iterator[HostLayer]:
    from sglang.srt.layers.radix_attention import RadixAttention  # noqa: PLC0415 - SGLang imports this module's package

    for path, parent in model.named_modules():
        has_sinks = any(getattr(parent, name, None) is not None for name in _SINKS)
        for name, module in parent.named_children():
            if isinstance(module, RadixAttention):
                yield HostLayer(f"{path}.{name}" if path else name, module, has_sinks)


def reasons(module: Any) -> Iterator[str]:
    """Yield what a layer has that the contract has no word for."""
    if module.use_irope:
        yield "irope: local attention whose chunks follow from a table of the engine"
    if module.xai_temperature_len > 0:
        yield "a temperature that follows from the length of the sequence (xai_temperature_len)"
    if module.pos_encoding_mode != "NONE":
        yield f"a rotary embedding inside of attention (pos_encoding_mode={module.pos_encoding_mode!r})"
    if module.logit_cap and module.logit_capping_method != "tanh":
        yield f"a soft cap by {module.logit_capping_method!r}; backends cap by tanh"
    if module.is_cross_attention:
        yield "cross attention: the encoder's keys are in front of the decoder's, in one row of slots"
    if module.attn_type.value == "encoder_only" and (module.sliding_window_size or -1) > -1:
        yield "a window in an encoder, which has two sides; a request with a KV cache has windows to the left alone"
    if module.attn_type.value == "decoder_bidirectional":
        yield "attention that is bidirectional inside of images (decoder_bidirectional)"


def requirements_of(layer: HostLayer, *, dtype: Any, kv_cache_dtype: Any, **engine: Any) -> Requirements:
    """
    Return what a layer requires.

    SGLang counts the tokens to the left of a token in a window, attnplug the token itself, too. Layers of encoders
    write K/V to the pool as others do, and each of their tokens attends to all others of the request.

    Args:
        layer: The layer, of this rank.
        dtype: Dtype of the model.
        kv_cache_dtype: Dtype of the pool.
        engine: Further requirements, by name: those of the pool and of the kind of step.
    """
    module = layer.module
    window = module.sliding_window_size
    return Requirements(
        head_size=module.qk_head_dim,
        head_size_v=module.v_head_dim,
        num_q_heads=module.tp_q_head_num,
        num_kv_heads=module.tp_k_head_num,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        sliding_window=window + 1 if window is not None and window > -1 else None,
        logits_soft_cap=module.logit_cap or None,
        causal=module.attn_type.value != "encoder_only",
        sinks=layer.has_sinks,
        latent=layer.latent,
        paged=True,
        **engine,
    )


def contract_layer(layer: HostLayer, *, quantized: bool) -> Layer:
    """
    Return a layer as `LoadedBackend.make_impl` takes it.

    Args:
        layer: The layer, with its weights.
        quantized: Whether the pool is of another dtype than the model. Scales are of a quantized pool only:
            SGLang reads them there alone, too.

    Raises:
        NotNegotiatedError: It has a scale for each head.
    """
    return Layer(
        name=layer.name,
        scale=layer.module.scaling,
        sinks_with_call=layer.has_sinks,
        k_scale=scale_of(layer, "k_scale") if quantized else None,
        v_scale=scale_of(layer, "v_scale") if quantized and not layer.latent else None,  # values are in the keys
    )


def scales_in(layer: HostLayer) -> tuple[Any, ...]:
    """Return what a layer has of scales, as it is: loading weights again replaces some of it."""
    module = layer.module
    return (module.k_scale_float, module.v_scale_float, module.k_scale, module.v_scale)


def scale_of(layer: HostLayer, name: str) -> float | None:
    """
    Return a scale of a layer; None where the checkpoint has none.

    Raises:
        NotNegotiatedError: It has a scale for each head.
    """
    scale = getattr(layer.module, f"{name}_float", None)
    scale = getattr(layer.module, name, None) if scale is None else scale
    if scale is None:
        return None
    if getattr(scale, "numel", lambda: 1)() != 1:
        raise NotNegotiatedError(
            f"the layer {layer.name!r} has {scale.numel()} values of {name}",
            "a layer of SGLang has one scale of keys and one of values",
            "use a checkpoint with one scale per layer, or leave --kv-cache-dtype out",
        )
    return float(scale)
