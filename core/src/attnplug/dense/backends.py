"""Loaded backends that callers share, and the metadata of batches whose sizes are not known beforehand."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract.inputs.batch import with_fields
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.contract.inputs.layer import Layer
from attnplug.contract.inputs.limits import Limits
from attnplug.contract.inputs.phase import BatchSplit
from attnplug.contract.metadata import assemble
from attnplug.dense.decisions import DecisionCache
from attnplug.request.device import Device
from attnplug.selection.load import load
from attnplug.selection.process import current_device
from attnplug.selection.select import select

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from attnplug.contract.attention import Attention
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.loaded import LoadedBackend
    from attnplug.contract.step_builder import StepBuilder
    from attnplug.contract.vendor import Metadata
    from attnplug.dense.params import CallParams
    from attnplug.request.requirements import Requirements
    from attnplug.request.settings import BackendNames, Options

_backends: Final[DecisionCache[LoadedBackend]] = DecisionCache(weak=True)
_planners: Final[DecisionCache[BatchPlanner]] = DecisionCache(64, per_thread=True)
_lock: Final = threading.RLock()


def shared_backend(
    requirements: Requirements,
    device: Device | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> LoadedBackend:
    """
    Return what `load` returns, and the same object for the same decision, as long as somebody holds it.

    Args:
        requirements: As for `load`.
        device: As for `load`.
        backend: As for `load`.
        options: As for `load`.

    Raises:
        NoBackendError: Nothing can serve.
        PluginError: As for `load`.
    """
    with _lock:
        selection = select(requirements, device, backend=backend, options=options)
        found = _backends.find(_backends.key(selection.agreement, selection.device))
        if found is None:
            found = load(requirements, device, backend=backend, options=options)
            # Loading may have chosen another candidate, in a later scope.
            _backends.keep(_backends.key(found.agreement, found.device_properties), found)
        return found


def planner_of(
    requirements: Requirements,
    device: torch.device,
    params: CallParams,
    learned: tuple[Tensor | None, Tensor | None],
    name: str,
    max_num_splits: int | None = None,
) -> BatchPlanner:
    """
    Return the planner and the implementation of calls with these requirements.

    Args:
        requirements: The requirements.
        device: The device.
        params: The numbers of the calls.
        learned: Sinks and ALiBi slopes.
        name: The layer's name in messages.
        max_num_splits: As in `Limits`.

    Raises:
        NoBackendError: Nothing can serve the calls.
    """
    kinds = tuple(None if one is None else (one.shape, one.dtype, one.device) for one in learned)
    where = _planners.key((requirements, params, max_num_splits, kinds), device)
    found = _planners.find(where)
    if found is None or not renew_parameters(found.impl, *learned):
        options = json.loads(params.options) or None
        backend = shared_backend(requirements, device_of(device), backend=params.backend or None, options=options)
        sinks, slopes = (None if one is None else one.detach().clone() for one in learned)
        impl = backend.make_impl(Layer(name=name, scale=params.scale, sinks=sinks, alibi_slopes=slopes))
        found = BatchPlanner(backend, impl, max_num_splits=max_num_splits)
        _planners.keep(where, found)
    return found


def renew_parameters(impl: Attention, sinks: Tensor | None, alibi_slopes: Tensor | None) -> bool:
    """
    Give a layer that owns its sinks and slopes the values that a call has; return whether it has them.

    Writes by kernels, replayed graphs, numpy, DLPack and `.data` are counted nowhere, so values are compared on the
    CPU; on a device, where comparing them would wait, they are copied for each call.

    Args:
        impl: The layer. Its plugin may take them in `make_impl` alone: then it has them where they can be compared.
        sinks: Of the shape, dtype and device of the layer's; None where it has none.
        alibi_slopes: Likewise.
    """
    pairs = [(impl.layer.sinks, sinks), (impl.layer.alibi_slopes, alibi_slopes)]
    learned = [(own, given) for own, given in pairs if own is not None and given is not None]
    changed = [(own, given) for own, given in learned if not (given.is_cpu and torch.equal(own, given))]
    if not changed:
        return True
    # What is not finite is refused by `make_impl`.
    if not impl.takes_parameters_late or any(one.is_cpu and not torch.isfinite(one).all() for _, one in changed):
        return False
    with outside_inference_mode():
        for own, given in changed:
            own.copy_(given.detach())
        impl.parameters_changed()
    return True


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


def split_of(metadata: Metadata) -> BatchSplit:
    """Return the split of a batch that was built, without its masks, for `BatchPlanner.build`."""
    return BatchSplit(
        batch=with_fields(metadata.batch, custom_mask=None, attn_bias=None),
        num_decodes=metadata.num_decodes,
        num_prefills=metadata.num_prefills,
        num_decode_tokens=metadata.num_decode_tokens,
        num_prefill_tokens=metadata.num_prefill_tokens,
        num_key_rows=metadata.num_key_rows,
        highest_block=metadata.highest_block,
    )


class BatchPlanner:
    """
    Builds the metadata of layers that share plans: the same backend and plan key.

    It needs no limits: a builder whose limits are too small is replaced by one for the next powers of two. Each thread
    has its own builder.

    Args:
        backend: The backend.
        impl: One of the layers.
        max_num_splits: As in `Limits`.

    Attributes:
        impl: The layer that was given.
    """

    def __init__(self, backend: LoadedBackend, impl: Attention, *, max_num_splits: int | None = None) -> None:
        self.impl = impl
        self._backend = backend
        self._max_num_splits = max_num_splits
        self._local = threading.local()

    def metadata(self, batch: Batch) -> Metadata:
        """Return the metadata of the batch: that of the last call in this thread, where it is the same batch."""
        if getattr(self._local, "batch", None) is not batch:
            self._local.batch = None
            self._local.metadata = self.build(batch)
            self._local.batch = batch
        metadata: Metadata = self._local.metadata
        return metadata

    def build(self, batch: Batch, checked: BatchSplit | None = None) -> Metadata:
        """
        Return new metadata of the batch.

        Args:
            batch: The batch.
            checked: What `split_of` returned for metadata of a batch that differs in the values of its masks alone:
                then nothing is checked, and no length is read, again.

        Raises:
            ContractError: As for `StepBuilder.build`.
            LimitsError: The backend does not keep `max_num_splits`.
        """
        builder = self._builder(batch)
        if checked is None:
            return builder.build(batch)
        masked = with_fields(checked.batch, custom_mask=batch.custom_mask, attn_bias=batch.attn_bias)
        split = evolve(checked, batch=masked)
        return assemble(builder.wrapped, split, builder.wrapped.plan_batch(masked, split, fast=False, graph=None))

    def _builder(self, batch: Batch) -> StepBuilder:
        """Return a builder whose limits hold the batch: the last one, or one for the next powers of two."""
        needed = (batch.num_reqs, batch.num_actual_tokens, max(1, batch.max_seq_len))
        limits: tuple[int, ...] = getattr(self._local, "limits", (0, 0, 0))
        if any(need > limit for need, limit in zip(needed, limits, strict=True)):
            limits = tuple(max(limit, 1 << (need - 1).bit_length()) for need, limit in zip(needed, limits, strict=True))
            # A sparse pattern ends at max_seqlen. A longer sequence raises the limit, and is refused with its length.
            pattern: dict[str, Any] = dict(self._backend.agreement.requirements.block_sparse or {})
            limits = (*limits[:2], min(limits[2], max(needed[2], pattern.get("max_seqlen", limits[2]))))
            most = Limits(
                max_num_reqs=limits[0],
                max_num_tokens=limits[1],
                max_seq_len=limits[2],
                max_num_splits=self._max_num_splits,
            )
            state = self._backend.make_state(most)
            self._local.builder = self._backend.make_builder([self.impl], state)
            self._local.limits = limits
        builder: StepBuilder = self._local.builder
        return builder
