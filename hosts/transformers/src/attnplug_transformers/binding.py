"""The backend of each attention module."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from attrs import frozen

from attnplug import Selection, select
from attnplug.contract import Attention, Layer, LoadedBackend
from attnplug.dense import BatchPlanner, DecisionCache, device_of, renew_parameters, shared_backend
from attnplug.errors import RequirementsError
from attnplug.models import ModelLayer, model_layers
from attnplug_transformers import KEY

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import nn
    from transformers import PreTrainedModel

    from attnplug.request import Requirements
    from attnplug_transformers.call import AttentionCall, CallSignature

_ANY_DTYPE: Final = "float32"
"""Placeholder for the dtype, which the call has."""


@frozen(eq=False)
class Binding:
    """
    One module's backend.

    Attributes:
        signature: The signature of the call that it was made for.
        requirements: The layer's requirements.
        selection: The decision.
        impl: The layer's implementation.
        planner: What builds its metadata, shared with other layers.
    """

    signature: CallSignature
    requirements: Requirements
    selection: Selection
    impl: Attention
    planner: BatchPlanner


_bindings: Final[DecisionCache[Binding]] = DecisionCache(4096)  # a model has hundreds of modules
_last: WeakKeyDictionary[nn.Module, Binding] = WeakKeyDictionary()
# Shared by modules, as long as one of their bindings exists.
_planners: WeakValueDictionary[Hashable, BatchPlanner] = WeakValueDictionary()
_lock = threading.RLock()


def find_binding(module: nn.Module) -> Binding | None:
    """Return the binding that the module last ran with."""
    return _last.get(module)


def bind(call: AttentionCall, requirements: Requirements, name: str) -> Binding:
    """
    Return the module's binding, a new one where the decision, the scale or the device changed, with the call's sinks.

    Args:
        call: The call.
        requirements: The layer's requirements.
        name: The layer's name.

    Raises:
        NoBackendError: No backend supports the requirements.
        ContractError: The backend refuses the layer.
    """
    module, device, sinks = call.module, call.query.device, call.sinks
    kind = None if sinks is None else (sinks.shape, sinks.dtype, sinks.device)
    where = _bindings.key((requirements, call.scale, kind), device, (module,))
    made = _bindings.find(where, (module,))
    if made is None or not renew_parameters(made.impl, sinks, None):
        made = _make(call, requirements, name)
        _bindings.keep(where, made, (module,))
    if _last.get(module) is not made:
        _last[module] = made
    return made


def _make(call: AttentionCall, requirements: Requirements, name: str) -> Binding:
    sinks, device = call.sinks, call.query.device
    # Tensors that are made in inference mode could not be written outside of it.
    with _lock, torch.inference_mode(mode=False):
        where = device_of(device)
        backend = shared_backend(requirements, where)
        own = None if sinks is None else sinks.detach().clone()
        impl = backend.make_impl(Layer(name=name, scale=call.scale, sinks=own))
        planner = _find_planner(backend, impl, device)
        return Binding(call.signature, requirements, select(requirements, where), impl, planner)


def _find_planner(backend: LoadedBackend, impl: Attention, device: torch.device) -> BatchPlanner:
    key = (id(backend), impl.plan_key, device)
    planner = _planners.get(key)
    if planner is None:
        _planners[key] = planner = BatchPlanner(backend, impl)
    return planner


_tables: Final[DecisionCache[tuple[ModelLayer, ...]]] = DecisionCache(scoped=False)
"""The layers of configurations."""


def layer_of_module(module: nn.Module, *, is_causal: bool | None = None) -> ModelLayer | None:
    """
    Return the layer that a module is, or None where its configuration does not describe it unambiguously.

    Args:
        module: An attention module.
        is_causal: The argument of its call; None leaves it to the module.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    layers = _tables.get(None, None, lambda: _layers_of(config), (config,))
    index = getattr(module, "layer_idx", None)
    if index is not None:
        layers = tuple(layer for layer in layers if layer.index == index)
    if len({layer.requirements.attn_type for layer in layers}) > 1:
        attn_type = _attn_type(module, is_causal=is_causal)
        layers = tuple(layer for layer in layers if layer.requirements.attn_type == attn_type)
    return layers[0] if len({layer.requirements for layer in layers}) == 1 else None


def _attn_type(module: nn.Module, *, is_causal: bool | None) -> str:
    """Return which attention of an encoder-decoder a module is."""
    if getattr(module, "is_causal", False) if is_causal is None else is_causal:
        return "decoder"
    return "encoder_decoder" if getattr(module, "is_decoder", False) else "encoder"


def _layers_of(config: Any) -> tuple[ModelLayer, ...]:
    try:
        return model_layers(config, dtype=_ANY_DTYPE, partial=True)
    except RequirementsError:
        return ()


def selections(model: PreTrainedModel) -> dict[str, Selection]:
    """
    Return the decision for every attention module that runs through attnplug.

    Those are the modules whose configuration has the attention implementation ``"attnplug"``. The mapping is empty
    where the model was never switched to it, or was switched back, or where its classes do not let their attention be
    replaced: transformers leaves the setting unchanged then. For a module that has not run yet the decision follows
    from its configuration, the model's dtype and its device. A layer that the configuration does not describe is absent
    until it has run.

    Args:
        model: A model of transformers.

    Returns:
        The decisions by module name, as in `model.named_modules()`.

    Raises:
        NoBackendError: No backend supports a layer.
    """
    found: dict[str, Selection] = {}
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", model.config), "_attn_implementation", None) != KEY:
            continue
        binding = find_binding(module)
        layer = layer_of_module(module) if binding is None else None
        if binding is not None:
            found[name] = binding.selection
        elif layer is not None and _is_attention(name, layer):
            dtype = str(model.dtype).removeprefix("torch.")
            requirements = layer.requirements.evolve(dtype=dtype, kv_cache_dtype="auto")
            found[name] = select(requirements, device_of(model.device))
    return found


def _is_attention(name: str, layer: ModelLayer) -> bool:
    """Whether the name is that of the attention module itself, rather than of a module around or inside it."""
    pattern = re.sub(r"\\\.\d+\\\.", lambda _: r"\.\d+\.", re.escape(layer.name))
    return re.fullmatch(rf"(.*\.)?{pattern}", name) is not None
