"""What the configuration of a running model says of one of its modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import RequirementsError
from attnplug.models import ModelLayer, model_layers

if TYPE_CHECKING:
    from torch import nn

_ANY_DTYPE: Final = "float32"
"""Stands for the dtype, which the call brings."""

_tables: dict[int, tuple[weakref.ref[Any], tuple[ModelLayer, ...]]] = {}


def described(module: nn.Module, *, is_causal: bool | None = None) -> ModelLayer | None:
    """
    Return the layer that a module is, or None where its configuration does not describe it unmistakably.

    Args:
        module: An attention module.
        is_causal: What the caller said of causality; None asks the module.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    layers = _table(config)
    index = getattr(module, "layer_idx", None)
    if index is not None:
        layers = tuple(layer for layer in layers if layer.index == index)
    if len({layer.requirements.attn_type for layer in layers}) > 1:
        role = _role(module, is_causal=is_causal)
        layers = tuple(layer for layer in layers if layer.requirements.attn_type == role)
    alike = {layer.requirements for layer in layers}
    return layers[0] if len(alike) == 1 else None


def _role(module: nn.Module, *, is_causal: bool | None) -> str:
    """Which attention of an encoder-decoder a module is."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if causal:
        return "decoder"
    return "encoder_decoder" if getattr(module, "is_decoder", False) else "encoder"


def _table(config: Any) -> tuple[ModelLayer, ...]:
    """Configurations are not hashable, and many modules share one: remember by identity, as long as it lives."""
    found = _tables.get(id(config))
    if found is not None and found[0]() is config:
        return found[1]
    try:
        layers = model_layers(config, dtype=_ANY_DTYPE, partial=True)
    except RequirementsError:
        layers = ()
    key = id(config)
    _tables[key] = (weakref.ref(config, lambda _: _tables.pop(key, None)), layers)
    return layers
