"""The backend of each attention module: chosen at its first call, and again when the decision would differ."""

from __future__ import annotations

import re
import threading
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from attrs import frozen

from attnplug import Selection, current_device, load, select
from attnplug.contract import AttentionImpl, Backend, Layer, Limits
from attnplug.errors import RequirementsError
from attnplug.models import ModelLayer, model_layers
from attnplug.request import Device, Requirements
from attnplug_transformers import KEY
from attnplug_transformers.call import tensor_version

if TYPE_CHECKING:
    from collections.abc import Hashable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from attnplug.contract import Batch, Metadata, MetadataBuilder
    from attnplug_transformers.call import AttentionCall, CallSignature

_ANY_DTYPE: Final = "float32"
"""Placeholder for the dtype, which the call has."""


class Group:
    """
    Layers that share plans: the same backend and plan key. The first of them to run in a step builds the metadata.

    Builders reuse their buffers: metadata is valid until the next build, and each thread has its own builder.
    """

    def __init__(self, backend: Backend, impl: AttentionImpl) -> None:
        self._backend = backend
        self._impl = impl
        self._local = threading.local()

    def metadata(self, batch: Batch) -> Metadata:
        """Return the metadata of the batch."""
        if getattr(self._local, "batch", None) is not batch:
            self._local.batch = None
            self._local.metadata = self._builder(batch).build(batch)
            self._local.batch = batch
        metadata: Metadata = self._local.metadata
        return metadata

    def _builder(self, batch: Batch) -> MetadataBuilder:
        """Return a builder whose limits hold the batch: the last one, or one for the next powers of two."""
        needed = (batch.num_reqs, batch.num_actual_tokens, batch.max_seq_len)
        limits: tuple[int, ...] = getattr(self._local, "limits", (0, 0, 0))
        if any(need > limit for need, limit in zip(needed, limits, strict=True)):
            limits = tuple(max(limit, 1 << (need - 1).bit_length()) for need, limit in zip(needed, limits, strict=True))
            # A sparse pattern ends at max_seqlen. A longer sequence raises the limit, and is refused with its length.
            covered = dict(self._backend.agreement.requirements.block_sparse or {}).get("max_seqlen", limits[2])
            limits = (*limits[:2], min(limits[2], max(needed[2], covered)))
            state = self._backend.make_state(
                Limits(max_num_reqs=limits[0], max_num_tokens=limits[1], max_seq_len=limits[2])
            )
            self._local.builder = self._backend.make_builder([self._impl], state)
            self._local.limits = limits
        builder: MetadataBuilder = self._local.builder
        return builder


@frozen(eq=False)
class Binding:
    """
    One module's backend.

    Attributes:
        signature: The signature of the call that it was made for.
        requirements: The layer's requirements.
        selection: The decision.
        impl: The layer's implementation.
        group: What it shares with other layers.
        sinks: The tensor of its sinks, and that tensor's version.
        scale: Factor of the scores.
        device: The device of its tensors.
    """

    signature: CallSignature
    requirements: Requirements
    selection: Selection
    impl: AttentionImpl
    group: Group
    sinks: tuple[Tensor | None, int]
    scale: float | None
    device: torch.device


_bindings: WeakKeyDictionary[nn.Module, Binding] = WeakKeyDictionary()
# Shared by modules, as long as one of their bindings exists.
_backends: WeakValueDictionary[Hashable, Backend] = WeakValueDictionary()
_groups: WeakValueDictionary[Hashable, Group] = WeakValueDictionary()
_lock = threading.RLock()


def find_binding(module: nn.Module) -> Binding | None:
    """Return the binding that the module last ran with."""
    return _bindings.get(module)


def bind(call: AttentionCall, requirements: Requirements, name: str) -> Binding:
    """
    Return the module's binding, a new one where the decision, the sinks, the scale or the device changed.

    Args:
        call: The call.
        requirements: The layer's requirements.
        name: The layer's name.

    Raises:
        NoBackendError: No backend supports the requirements.
        ContractError: The backend refuses the layer.
    """
    module, scale, sinks, device = call.module, call.scale, call.sinks, call.query.device
    where = device_of(device)
    version = tensor_version(sinks)
    found = _bindings.get(module)
    if (
        found is not None
        and found.sinks[0] is sinks
        and (found.sinks[1], found.scale, found.device, found.requirements) == (version, scale, device, requirements)
        and select(requirements, where) is found.selection
    ):
        return found
    with _lock:
        backend = _load(requirements, where)
        impl = backend.make_impl(Layer(name=name, scale=scale, sinks=None if sinks is None else sinks.detach()))
        group = _find_group(backend, impl, device)
        # Loading may have excluded a candidate: later calls are compared with what select returns from now on.
        selection = select(requirements, where)
        made = Binding(call.signature, requirements, selection, impl, group, (sinks, version), scale, device)
        _bindings[module] = made
    return made


def _load(requirements: Requirements, where: Device | None) -> Backend:
    selection = select(requirements, where)
    backend = _backends.get((selection.agreement, selection.device))
    if backend is None:
        backend = load(requirements, where)
        _backends[backend.agreement, backend.device_properties] = backend
    return backend


def _find_group(backend: Backend, impl: AttentionImpl, device: torch.device) -> Group:
    key = (id(backend), impl.plan_key, device)
    group = _groups.get(key)
    if group is None:
        _groups[key] = group = Group(backend, impl)
    return group


def device_of(device: torch.device) -> Device:
    """Return a tensor's device as `select` takes it."""
    here = current_device()
    if here.type == device.type:
        return here
    if device.type == "cpu":
        return Device.cpu()
    current = Device.current()  # the process may have created a CUDA context since it looked
    return current if current.type == device.type else Device(device.type)


def use_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: backends know its type alone, and a machine may have several of that type."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_tables: dict[int, tuple[weakref.ref[Any], tuple[ModelLayer, ...]]] = {}
"""By the identity of a configuration, the configuration and its layers: it is not hashable, and modules share it."""


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
    layers = _layers_of(config)
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
    key = id(config)
    found = _tables.get(key)
    if found is not None and found[0]() is config:
        return found[1]
    try:
        layers = model_layers(config, dtype=_ANY_DTYPE, partial=True)
    except RequirementsError:
        layers = ()
    _tables[key] = (weakref.ref(config, lambda _: _tables.pop(key, None)), layers)
    return layers


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
