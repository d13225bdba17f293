"""What the configuration of a running model says of one of its modules."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from attrs import define, frozen

from attnplug import Selection, current_device, load, select
from attnplug.contract import AttentionImpl, Backend, Layer, Limits
from attnplug.errors import RequirementsError
from attnplug.models import ModelLayer, model_layers
from attnplug.request import Device, Requirements
from attnplug_transformers.call import tensor_version

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch
    from torch import Tensor, nn

    from attnplug.contract import Batch, Metadata, MetadataBuilder
    from attnplug_transformers.call import CallSignature


_ANY_DTYPE: Final = "float32"
"""Stands for the dtype, which the call brings."""

_tables: dict[int, tuple[weakref.ref[Any], tuple[ModelLayer, ...]]] = {}


def layer_of_module(module: nn.Module, *, is_causal: bool | None = None) -> ModelLayer | None:
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


class Group:
    """
    Layers that share plans: the same backend and plan key. Metadata is built by the first of them that runs in a step.

    Builders keep buffers of their own: metadata holds until the next build, and each thread has a builder of its own.
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
        """
        Return a builder whose limits hold the batch: those of the last one, or the next powers of two. Sequences longer
        than a pattern covers are allowed for where they are asked for, and refused then, with their own length.
        """
        needed = (batch.num_reqs, batch.num_actual_tokens, batch.max_seq_len)
        limits: tuple[int, ...] = getattr(self._local, "limits", (0, 0, 0))
        if any(need > limit for need, limit in zip(needed, limits, strict=True)):
            limits = tuple(max(limit, 1 << (need - 1).bit_length()) for need, limit in zip(needed, limits, strict=True))
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
        call: The facts of the call that it was made for.
        requirements: What the layer asks for.
        selection: The decision.
        impl: The layer's implementation.
        group: What it shares with other layers.
        sinks: The tensor of its sinks, and that tensor's version.
        scale: Factor of the scores.
        device: Where the tensors are.
    """

    call: CallSignature
    requirements: Requirements
    selection: Selection
    impl: AttentionImpl
    group: Group
    sinks: tuple[Tensor | None, int]
    scale: float | None
    device: torch.device


@define
class _Made:
    """What is shared between modules as long as one of them lives."""

    backends: WeakValueDictionary[Hashable, Backend]
    groups: WeakValueDictionary[Hashable, Group]


_bindings: WeakKeyDictionary[nn.Module, Binding] = WeakKeyDictionary()
_made = _Made(WeakValueDictionary(), WeakValueDictionary())
_lock = threading.RLock()


def bound(module: nn.Module) -> Binding | None:
    """Return the binding that the module last ran with."""
    return _bindings.get(module)


def bind(
    module: nn.Module,
    call: CallSignature,
    requirements: Requirements,
    name: str,
    scale: float | None,
    sinks: Tensor | None,
    device: torch.device,
) -> Binding:
    """
    Return the module's binding, made anew where the decision, the sinks, the scale or the device changed.

    Args:
        module: The attention module.
        call: The facts of this call.
        requirements: What it asks for.
        name: The layer's name.
        scale: Factor of the scores.
        sinks: Its sinks.
        device: Where the tensors are.

    Raises:
        NoBackendError: Nothing can serve the requirements.
        ContractError: The backend refuses the layer.
    """
    where = device_of(device)
    found = _bindings.get(module)
    stamp = (sinks, tensor_version(sinks))
    if (
        found is not None
        and _still_holds(found, requirements, stamp, scale, device)
        and select(requirements, where) is found.selection
    ):
        return found
    with _lock:
        backend = _backend(requirements, where)
        impl = backend.make_impl(Layer(name=name, scale=scale, sinks=None if sinks is None else sinks.detach()))
        group = _group(backend, impl, device)
        # Loading may have left a candidate out; what select says from now on is what this binding is compared with.
        made = Binding(call, requirements, select(requirements, where), impl, group, stamp, scale, device)
        _bindings[module] = made
    return made


def device_of(device: torch.device) -> Device:
    """Return the selector's word for a tensor's device."""
    here = current_device()
    if here.type == device.type:
        return here
    if device.type == "cpu":
        return Device.cpu()
    current = Device.current()  # a context may have come to life since the process looked
    return current if current.type == device.type else Device(device.type)


def _still_holds(
    found: Binding,
    requirements: Requirements,
    sinks: tuple[Tensor | None, int],
    scale: float | None,
    device: torch.device,
) -> bool:
    same_sinks = found.sinks[0] is sinks[0] and found.sinks[1] == sinks[1]
    return same_sinks and found.scale == scale and found.device == device and found.requirements == requirements


def _backend(requirements: Requirements, where: Device | None) -> Backend:
    selection = select(requirements, where)
    key = (selection.agreement, selection.device)
    backend = _made.backends.get(key)
    if backend is None:
        backend = load(requirements, where)
        _made.backends[(backend.agreement, backend.device_properties)] = backend
    return backend


def _group(backend: Backend, impl: AttentionImpl, device: torch.device) -> Group:
    key = (id(backend), impl.plan_key, device)
    group = _made.groups.get(key)
    if group is None:
        group = Group(backend, impl)
        _made.groups[key] = group
    return group
