"""
Runs dense calls: each decides once, and keeps its implementation and its metadata for the next call of its shape.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

import torch
from attrs import define, evolve, field
from torch import Tensor

from attnplug.contract.inputs.batch import Batch, with_fields
from attnplug.contract.inputs.kv_cache import autocast_type_of, outside_inference_mode
from attnplug.contract.inputs.upload import upload
from attnplug.dense.backends import planner_of, renew_parameters, split_of
from attnplug.dense.decisions import DecisionCache
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
from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.vendor import Metadata
    from attnplug.dense.backends import BatchPlanner

    Flatten = Callable[[Tensor], Tensor]

MOST_CALLS: Final = 32
"""Entries of each cache of a thread: a plan of FlashInfer takes 8 MiB of device memory."""

_is_autocast_enabled: Final = torch.is_autocast_enabled
NAME: Final = "attnplug.attention"
"""The layer's name in messages."""


@define(eq=False)
class PreparedAttention:
    """
    What calls of `attention` or `attention_varlen` of one shape run on.

    `prepare_attention` returns one for calls without mask, sinks and slopes. It serves tensors of the shapes, the
    dtypes, the device and the lengths that it was prepared for, in the thread and the CUDA stream that prepared it, as
    long as `scope_key` stays equal: `DecisionCache` keeps it under all of these. It holds no tensor of a caller.

    Attributes:
        id: The candidate that runs, ``backend/variant``.
    """

    id: str
    _planner: BatchPlanner = field(repr=False)
    _batch: Batch | None = field(repr=False)  # without its masks; None where no query is given
    _shape: tuple[int, ...] = field(repr=False)  # of the output as the caller of `attention` gets it
    _rows: tuple[int, int] = field(repr=False)
    _return_lse: bool = field(repr=False)
    _autocast_type: str = field(repr=False)
    _flatten: Flatten = field(repr=False)  # makes the masks of a call those of a `Batch`
    _metadata: Metadata | None = field(default=None, init=False, repr=False)
    _masks: tuple[Tensor | None, Tensor | None] | None = field(default=None, init=False, repr=False)  # of `_metadata`
    _checked: BatchSplit | None = field(default=None, init=False, repr=False)  # of a call with masks

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_checked: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """
        Attend.

        Args:
            query: ``(query tokens, num_q_heads, head_size)``, those of a batch one after another; the last axis is
                contiguous, as of the others.
            key: ``(key tokens, num_kv_heads, head_size)``.
            value: ``(key tokens, num_kv_heads, head_size_v)``.
            is_checked: Whether tensors of these shapes, strides, dtypes and devices have been given before, and no
                gradient is recorded: then nothing is checked, which takes longer than all else here.

        Returns:
            ``(query tokens, num_q_heads * head_size_v)``, contiguous; and the log-sum-exp
            ``(query tokens, num_q_heads)`` float32, or None.

        Raises:
            TensorError: A tensor is another one than it was prepared for.
        """
        return self._attend(query, key, value, self._metadata, None, is_checked=is_checked)

    def run_shaped(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: CallTensors,
        *,
        is_checked: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Attend with the other tensors of a call, and return the results in the shapes of `attention`.

        Args:
            query: As for `run`, and so are key and value.
            key: Likewise.
            value: Likewise.
            tensors: The other tensors: sinks and slopes that the layer has already, and masks.
            is_checked: Whether tensors of these shapes, strides, dtypes and devices have been given before, and no
                gradient is recorded.
        """
        metadata = self._metadata if tensors is NO_TENSORS else self._metadata_with(tensors)
        output, lse = self._attend(query, key, value, metadata, tensors.sinks, is_checked=is_checked)
        return output.view(self._shape), None if lse is None else lse.view(self._shape[:-1])

    def takes(self, tensors: CallTensors) -> bool:
        """Give the layer the sinks and slopes of a call; return False where it has to be made again for them."""
        return tensors is NO_TENSORS or renew_parameters(self._planner.impl, tensors.sinks, tensors.alibi_slopes)

    def build(self) -> PreparedAttention:
        """Build the metadata of calls without masks."""
        if self._batch is not None:
            self._metadata = self._planner.build(self._batch)
        return self

    def _metadata_with(self, tensors: CallTensors) -> Metadata | None:
        """
        Return the metadata with the masks of a call. On the CPU it is kept for equal ones; on a device, where comparing
        them would wait, it is built for each call.
        """
        masks = (tensors.mask, tensors.bias)
        if tensors.mask is tensors.bias is None or self._batch is None:
            return self._metadata
        on_cpu = all(one is None or one.is_cpu for one in masks)
        if on_cpu and self._masks is not None and all(map(_are_equal, self._masks, masks)):
            return self._metadata
        with outside_inference_mode():
            copies = tuple(None if one is None else one.detach().clone() if on_cpu else one.detach() for one in masks)
            flat = [None if one is None else self._flatten(one) for one in copies]
            batch = with_fields(self._batch, custom_mask=flat[0], attn_bias=flat[1])
            metadata = self._planner.build(batch, self._checked)
        if self._checked is None:
            self._checked = split_of(metadata)
        if on_cpu:
            self._metadata, self._masks = metadata, (copies[0], copies[1])
        return metadata

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: Metadata | None,
        sinks: Tensor | None,
        *,
        is_checked: bool,
    ) -> tuple[Tensor, Tensor | None]:
        impl, output, lse = self._planner.impl, query.new_empty(self._rows), None
        if self._return_lse:
            lse = query.new_empty((self._rows[0], impl.num_q_heads), dtype=torch.float32)
        if is_checked and metadata is not None and not _is_autocast_enabled(self._autocast_type):
            # What `forward` compares is equal to that of a call that it has checked, and the results are new memory.
            impl.wrapped.run(query, key, value, None, metadata, output, lse)
        elif metadata is not None:
            try:
                impl.forward(query, key, value, None, metadata, output, lse=lse)
            except AttributeError as error:
                if error.obj is None:
                    _explain_missing_cache(self.id, error)
                raise
        if lse is not None and sinks is not None and impl.lse_includes_sink is False:
            torch.logaddexp(lse, sinks.detach().float(), out=lse)
        return output, lse


def _explain_missing_cache(plugin_id: str, error: AttributeError) -> NoReturn:
    """Refuse a plugin whose kernels read pages alone, and whose manifest declares contiguous K/V besides."""
    raise PluginContractError(
        f"the plugin of {plugin_id} raised {error!r} in a call without a KV cache",
        "its manifest declares contiguous K/V: `paged` as a feature, or paged = true, adds pages to them",
        "for kernels that read pages alone, add [[rules]] with when = { paged = false } and a reason to attnplug.toml; "
        "or choose another backend for calls without a KV cache",
    ) from error


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


_calls: Final[DecisionCache[PreparedAttention]] = DecisionCache(MOST_CALLS, per_thread=True)


def run_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: CallParams,
    tensors: CallTensors,
    keep: Callable[[PreparedAttention], object] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """
    Run a call whose sequences have one length, and its keys another.

    Args:
        query: ``(batch, queries, num_q_heads, head_size)``.
        key: ``(batch, keys, num_kv_heads, head_size)``.
        value: ``(batch, keys, num_kv_heads, head_size_v)``.
        params: Its numbers.
        tensors: Its other tensors.
        keep: Called with what it has run on.

    Returns:
        ``(batch, queries, num_q_heads, head_size_v)``; and ``(batch, queries, num_q_heads)`` float32, or None.
    """
    check_are_tensors(query, key, value, tensors)
    if query.is_cuda and query.device.index != torch.cuda.current_device():
        with torch.cuda.device(query.device):
            return run_padded(query, key, value, params, tensors)
    prepared = prepare_padded(query, key, value, params, tensors)
    results = prepared.run_shaped(_packed(query), _packed(key), _packed(value), tensors)
    if keep is not None:
        keep(prepared)
    return results


def prepare_padded(
    query: Tensor, key: Tensor, value: Tensor, params: CallParams, tensors: CallTensors
) -> PreparedAttention:
    """Return what `run_padded` runs on, on the current device: kept from a call of this shape, or made and kept."""
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse_capture()
    shape = query.shape
    where = _calls.key((shape, key.shape, value.shape, query.dtype, params, _kinds(tensors)), query.device)
    prepared = _calls.find(where)
    if prepared is None or not prepared.takes(tensors):
        check_tensors(query, key, value, "(batch, tokens, heads, head_size)")
        batch, queries, keys = shape[0], shape[1], key.shape[1]
        if params.causal:
            check_causal(queries, keys, "were given")
        sizes = (batch, shape[2], queries, keys)
        flatten = partial(flat_mask, sizes=sizes, dtype=query.dtype, device=query.device)
        prepared = _prepare((query, key, value), params, tensors, ([queries] * batch, [keys] * batch), flatten)
        _calls.keep(where, prepared)
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
    return prepared.run_shaped(plain_rows(query), plain_rows(key), plain_rows(value), tensors)


def prepare_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor | None],
    starts_cpu: tuple[Tensor | None, Tensor | None],
    params: CallParams,
    tensors: CallTensors,
) -> PreparedAttention:
    """Return what `run_packed` runs on, on the current device: kept from such a call, or made and kept."""
    query_lens = lengths_of("query_start_loc", starts[0], starts_cpu[0])
    key_lens = query_lens if starts[1] is None else lengths_of("key_start_loc", starts[1], starts_cpu[1])
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse_capture()
    sizes = (query.shape, key.shape, value.shape, query_lens, key_lens)
    where = _calls.key((sizes, query.dtype, params, _kinds(tensors)), query.device)
    prepared = _calls.find(where)
    if prepared is None or not prepared.takes(tensors):
        check_tensors(query, key, value, "(tokens, heads, head_size)")
        check_lengths(query_lens, key_lens, query.shape[0], key.shape[0])
        for one, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
            if params.causal:
                check_causal(queries, keys, f"were given for sequence {one}")
        prepared = _prepare((query, key, value), params, tensors, (list(query_lens), list(key_lens)), _unchanged)
        _calls.keep(where, prepared)
    return prepared


def lengths_of(name: str, starts: Tensor, copy: Tensor | None) -> tuple[int, ...]:
    """
    Return the lengths between cumulative starts. Without a CPU copy this waits for the device.

    They are read each time: torch counts no changes by kernels, replayed graphs or an array of the same memory.

    Raises:
        TensorError: It is no vector of whole numbers, or falls; or the copy of a tensor on the CPU differs from it.
    """
    source = starts if copy is None else copy
    lengths = lengths_between(name, source)
    if source is not starts and isinstance(starts, Tensor) and starts.is_cpu and not torch.equal(source, starts.cpu()):
        refuse_copy(name)
    return lengths


def _kinds(tensors: CallTensors) -> tuple[object, ...]:
    """Return what of the other tensors a decision depends on. Their values may change unseen."""
    if tensors is NO_TENSORS:
        return ()
    return tuple(None if one is None else (one.shape, one.dtype, one.device) for one in tensors)


def _unchanged(mask: Tensor) -> Tensor:
    return mask


def _prepare(
    inputs: tuple[Tensor, Tensor, Tensor],
    params: CallParams,
    tensors: CallTensors,
    lengths: tuple[list[int], list[int]],
    flatten: Flatten,
) -> PreparedAttention:
    """Decide and load a checked call, and build its metadata where it has no masks."""
    device = inputs[0].device
    requirements = requirements_of(*inputs, params, tensors, is_cross=lengths[0] != lengths[1])
    # Tensors that are made in inference mode could not be written outside of it.
    with outside_inference_mode():
        planner = planner_of(requirements, device, params, (tensors.sinks, tensors.alibi_slopes), NAME)
        prepared = PreparedAttention(
            id=planner.impl.backend.id,
            planner=planner,
            batch=_batch(lengths, params.causal, device) if any(lengths[0]) else None,
            shape=(*inputs[0].shape[:-1], inputs[2].shape[-1]),
            rows=(sum(lengths[0]), planner.impl.output_width),
            return_lse=params.return_lse,
            autocast_type=autocast_type_of(device),
            flatten=flatten,
        )
        return prepared.build() if tensors.mask is tensors.bias is None else prepared


def _batch(lengths: tuple[list[int], list[int]], causal: bool, device: torch.device) -> Batch:  # noqa: FBT001
    batch = Batch.from_lengths(*lengths, causal=causal)
    if device.type == "cpu" or batch.key_start_loc is None:
        return batch
    return evolve(
        batch,
        query_start_loc=upload(batch.query_start_loc, device),
        seq_lens=upload(batch.seq_lens, device),
        key_start_loc=upload(batch.key_start_loc, device),
    )


def _packed(padded: Tensor) -> Tensor:
    return padded.flatten(0, 1) if padded.is_contiguous() else plain_rows(padded).flatten(0, 1)


def plain_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, as kernels take it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
