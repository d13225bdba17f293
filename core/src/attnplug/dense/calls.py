"""
Runs dense calls: each decides once, and keeps its implementation and its metadata for the next call of its shape.

What is kept belongs to one thread and, on CUDA, to one stream. It is dropped when decisions may change (`scope_key`),
and when a tensor that it was made from is gone. It keeps no tensor of a caller alive.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.contract.inputs.batch import Batch
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.contract.inputs.layer import Layer
from attnplug.contract.inputs.upload import upload
from attnplug.dense.backends import BatchPlanner, device_of, shared_backend
from attnplug.dense.params import (
    NO_TENSORS,
    CallParams,
    CallTensors,
    check_are_tensors,
    check_causal,
    check_lengths,
    check_tensors,
    flat_mask,
    lengths_between,
    refuse_capture,
    refuse_copy,
    requirements_of,
)
from attnplug.selection.process import current_state
from attnplug.selection.scope import scope_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.metadata import Metadata
    from attnplug.request.requirements import Requirements

_MOST: Final = 32
"""Entries of each table of a thread: a plan of FlashInfer takes 8 MiB of device memory."""

NAME: Final = "attnplug.attention"
"""The layer's name in messages."""


@frozen(eq=False)
class PreparedCall:
    """
    What calls of one shape run on.

    Attributes:
        impl: The implementation.
        planner: What its metadata is built with.
        metadata: The metadata; None where no query is given.
        tensors: The tensors that all of it was made from.
        shape: Of the output as the caller gets it.
        rows: Of the output as the implementation writes it, with their width.
        return_lse: Whether the LSE is computed.
    """

    impl: AttentionImpl
    planner: BatchPlanner
    metadata: Metadata | None
    tensors: tuple[ref[Tensor], ...]
    shape: tuple[int, ...] = ()
    rows: tuple[int, int] = (0, 0)
    return_lse: bool = False

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """
        Attend.

        Args:
            query: ``(query tokens, num_q_heads, head_size)``.
            key: ``(key tokens, num_kv_heads, head_size)``.
            value: ``(key tokens, num_kv_heads, head_size_v)``.
            sinks: The call's sinks.

        Returns:
            The output, in `shape`; and the LSE, float32 without the last axis, or None.
        """
        output, lse = self.run_rows(query, key, value, sinks)
        return output.view(self.shape), None if lse is None else lse.view(self.shape[:-1])

    def run_rows(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attend as `run` does; the output and the LSE are as the implementation writes them, a row for each query."""
        impl, output, lse = self.impl, query.new_empty(self.rows), None
        if self.return_lse:
            lse = query.new_empty((self.rows[0], impl.num_q_heads), dtype=torch.float32)
        if self.metadata is not None:
            impl.forward(query, key, value, None, self.metadata, output, lse=lse)
        if lse is not None and sinks is not None and impl.lse_includes_sink is False:
            torch.logaddexp(lse, sinks.detach().float(), out=lse)
        return output, lse


class _Kept(threading.local):
    """What a thread keeps: the oldest entry makes room for a new one."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, PreparedCall] = {}
        self.layers: dict[Hashable, PreparedCall] = {}
        self.lengths: dict[Hashable, tuple[ref[Tensor], tuple[int, ...]]] = {}
        self.generation = 0

    def drop_outdated(self) -> None:
        """Drop what was decided before the last change of the registry or the settings."""
        generation = current_state().generation
        if generation != self.generation:
            self.calls.clear()
            self.layers.clear()
            self.generation = generation


_kept: Final = _Kept()


def run_padded(
    query: Tensor, key: Tensor, value: Tensor, params: CallParams, tensors: CallTensors
) -> tuple[Tensor, Tensor | None]:
    """
    Run a call whose sequences have one length, and its keys another.

    Args:
        query: ``(batch, queries, num_q_heads, head_size)``.
        key: ``(batch, keys, num_kv_heads, head_size)``.
        value: ``(batch, keys, num_kv_heads, head_size_v)``.
        params: Its numbers.
        tensors: Its other tensors.

    Returns:
        ``(batch, queries, num_q_heads, head_size_v)``; and ``(batch, queries, num_q_heads)`` float32, or None.
    """
    check_are_tensors(query, key, value, tensors)
    if query.is_cuda and query.device.index != torch.cuda.current_device():
        with torch.cuda.device(query.device):
            return run_padded(query, key, value, params, tensors)
    prepared = prepare_padded(query, key, value, params, tensors)
    return prepared.run(_packed(query), _packed(key), _packed(value), tensors.sinks)


def prepare_padded(query: Tensor, key: Tensor, value: Tensor, params: CallParams, tensors: CallTensors) -> PreparedCall:
    """Return what `run_padded` runs on, on the current device: kept from a call of this shape, or made and kept."""
    shape = query.shape
    where: tuple[Any, ...] = (shape, key.shape, value.shape, query.dtype, query.device, params, scope_key())
    where, given = _place(where, query, tensors)
    prepared = _find(where, given)
    if prepared is None:
        check_tensors(query, key, value, "(batch, tokens, heads, head_size)")
        batch, queries, keys = shape[0], shape[1], key.shape[1]
        if params.causal:
            check_causal(queries, keys, "were given")
        sizes = (batch, queries, keys)
        mask = None if tensors.mask is None else flat_mask(tensors.mask, 1, sizes, query)
        bias = None if tensors.bias is None else flat_mask(tensors.bias, shape[2], sizes, query)
        lengths = ([queries] * batch, [keys] * batch)
        prepared = _prepare(where, (query, key, value), params, tensors, lengths, (mask, bias))
    return prepared


def run_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor | None],
    starts_cpu: tuple[Tensor | None, Tensor | None],
    params: CallParams,
    tensors: CallTensors,
) -> tuple[Tensor, Tensor | None]:
    """
    Run a call whose sequences are packed one after another.

    Args:
        query: ``(query tokens, num_q_heads, head_size)``.
        key: ``(key tokens, num_kv_heads, head_size)``.
        value: ``(key tokens, num_kv_heads, head_size_v)``.
        starts: `query_start_loc`, and `key_start_loc` where it is another one.
        starts_cpu: Their CPU copies.
        params: Its numbers.
        tensors: Its other tensors.

    Returns:
        ``(query tokens, num_q_heads, head_size_v)``; and ``(query tokens, num_q_heads)`` float32, or None.
    """
    check_are_tensors(query, key, value, tensors)
    if query.is_cuda and query.device.index != torch.cuda.current_device():
        with torch.cuda.device(query.device):
            return run_packed(query, key, value, starts, starts_cpu, params, tensors)
    prepared = prepare_packed(query, key, value, starts, starts_cpu, params, tensors)
    return prepared.run(_plain_rows(query), _plain_rows(key), _plain_rows(value), tensors.sinks)


def prepare_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor | None],
    starts_cpu: tuple[Tensor | None, Tensor | None],
    params: CallParams,
    tensors: CallTensors,
) -> PreparedCall:
    """Return what `run_packed` runs on, on the current device: kept from such a call, or made and kept."""
    query_lens = lengths_of("query_start_loc", starts[0], starts_cpu[0])
    key_lens = query_lens if starts[1] is None else lengths_of("key_start_loc", starts[1], starts_cpu[1])
    sizes = (query.shape, key.shape, value.shape, query_lens, key_lens)
    where: tuple[Any, ...] = (sizes, query.dtype, query.device, params, scope_key())
    where, given = _place(where, query, tensors)
    prepared = _find(where, given)
    if prepared is None:
        check_tensors(query, key, value, "(tokens, heads, head_size)")
        check_lengths(query_lens, key_lens, query.shape[0], key.shape[0])
        for one, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
            if params.causal:
                check_causal(queries, keys, f"were given for sequence {one}")
        mask, bias = (None if one is None else one.detach() for one in (tensors.mask, tensors.bias))
        lengths = (list(query_lens), list(key_lens))
        prepared = _prepare(where, (query, key, value), params, tensors, lengths, (mask, bias))
    return prepared


def lengths_of(name: str, starts: Tensor, copy: Tensor | None) -> tuple[int, ...]:
    """
    Return the lengths between cumulative starts. Without a CPU copy this waits for the device, once for each tensor.

    Of a tensor on the CPU they are read each time: its memory may be that of an array, whose changes torch does not
    count.

    Raises:
        TensorError: It is no vector of whole numbers, or falls; or the copy of a tensor on the CPU differs from it.
    """
    source = starts if copy is None else copy
    if not isinstance(source, Tensor):
        return lengths_between(name, source)  # which refuses it
    if source.is_cpu:
        lengths = lengths_between(name, source)
        if source is not starts and isinstance(starts, Tensor) and starts.is_cpu and not torch.equal(source, starts):
            refuse_copy(name)
        return lengths
    where = identity(source)
    found = _kept.lengths.get(where)
    if found is not None and found[0]() is source:
        return found[1]
    lengths = lengths_between(name, source)
    if not source.is_inference():
        table = _kept.lengths
        _keep(table, where, (ref(source, _dropping(table, where)), lengths))
    return lengths


def identity(tensor: Tensor | None) -> Hashable:
    """Return what is equal for the same tensor with the same contents only, as long as the tensor exists."""
    if tensor is None:
        return None
    if tensor.is_inference():
        return object()  # nobody counts its changes
    return id(tensor), tensor._version  # noqa: SLF001 - torch has no public name for it


def _place(where: tuple[Any, ...], query: Tensor, tensors: CallTensors) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Return where a call is kept, and the tensors that it depends on."""
    if query.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            refuse_capture()
        where = (*where, torch.cuda.current_stream(query.device).cuda_stream)
    if tensors is NO_TENSORS:
        return where, ()
    return (*where, *map(identity, tensors)), tuple(one for one in tensors if one is not None)


def _find(where: Hashable, given: tuple[Tensor, ...]) -> PreparedCall | None:
    """Return a call that was prepared from these very tensors: an address is used again after a tensor is gone."""
    found = _kept.calls.get(where)
    if found is None or (given and any(kept() is not one for kept, one in zip(found.tensors, given, strict=True))):
        return None
    return found


def _prepare(
    where: Hashable,
    inputs: tuple[Tensor, Tensor, Tensor],
    params: CallParams,
    tensors: CallTensors,
    lengths: tuple[list[int], list[int]],
    masks: tuple[Tensor | None, Tensor | None],
) -> PreparedCall:
    """Decide, load, and build the metadata of a checked call; keep the result."""
    _kept.drop_outdated()
    requirements, device = (
        requirements_of(*inputs, params, tensors, is_cross=lengths[0] != lengths[1]),
        inputs[0].device,
    )
    # Tensors that are made in inference mode could not be written outside of it.
    with outside_inference_mode():
        layer = _layer(requirements, device, params, tensors)
        metadata = layer.planner.build(_batch(lengths, params, masks, device)) if any(lengths[0]) else None
    table = _kept.calls
    given = tuple(one for one in tensors if one is not None)
    shape, refs = (
        (*inputs[0].shape[:-1], inputs[2].shape[-1]),
        tuple(ref(one, _dropping(table, where)) for one in given),
    )
    rows = (sum(lengths[0]), layer.impl.output_width)
    prepared = evolve(layer, metadata=metadata, tensors=refs, shape=shape, rows=rows, return_lse=params.return_lse)
    _keep(table, where, prepared)
    return prepared


def _layer(requirements: Requirements, device: torch.device, params: CallParams, tensors: CallTensors) -> PreparedCall:
    """Return the implementation that calls of all shapes share, without metadata."""
    learned = tuple(one for one in (tensors.sinks, tensors.alibi_slopes) if one is not None)
    where = (requirements, device, params, scope_key(), *map(identity, learned))
    if device.type == "cuda":
        where = (*where, torch.cuda.current_stream(device).cuda_stream)
    table = _kept.layers
    found = table.get(where)
    if found is not None and all(kept() is one for kept, one in zip(found.tensors, learned, strict=True)):
        return found
    options = json.loads(params.options) or None
    backend = shared_backend(requirements, device_of(device), backend=params.backend or None, options=options)
    impl = backend.make_impl(
        Layer(name=NAME, scale=params.scale, sinks=_copied(tensors.sinks), alibi_slopes=_copied(tensors.alibi_slopes))
    )
    refs = tuple(ref(one, _dropping(table, where)) for one in learned)
    made = PreparedCall(impl, BatchPlanner(backend, impl), None, refs)
    _keep(table, where, made)
    return made


def _batch(
    lengths: tuple[list[int], list[int]],
    params: CallParams,
    masks: tuple[Tensor | None, Tensor | None],
    device: torch.device,
) -> Batch:
    batch = Batch.from_lengths(*lengths, causal=params.causal, custom_mask=masks[0], attn_bias=masks[1])
    if device.type == "cpu" or batch.key_start_loc is None:
        return batch
    return evolve(
        batch,
        query_start_loc=upload(batch.query_start_loc, device),
        seq_lens=upload(batch.seq_lens, device),
        key_start_loc=upload(batch.key_start_loc, device),
    )


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _packed(padded: Tensor) -> Tensor:
    return padded.flatten(0, 1) if padded.is_contiguous() else _plain_rows(padded).flatten(0, 1)


def _plain_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, as kernels take it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _keep(table: dict[Any, Any], where: Hashable, entry: Any) -> None:
    table[where] = entry
    while len(table) > _MOST:
        table.pop(next(iter(table)), None)


def _dropping(table: dict[Any, Any], where: Hashable) -> Callable[[object], None]:
    """Return what drops an entry when a tensor that it was made from is gone."""

    def drop(_: object) -> None:
        table.pop(where, None)

    return drop
