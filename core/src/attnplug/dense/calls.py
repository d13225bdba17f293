"""
Runs dense calls: each decides once, and keeps its implementation and its metadata for the next call of its shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from attnplug.contract.inputs.batch import Batch
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.contract.inputs.upload import upload
from attnplug.dense.backends import planner_of
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

if TYPE_CHECKING:
    from attnplug.contract.attention import Attention
    from attnplug.contract.vendor import Metadata

_MOST: Final = 32
"""Entries of each cache of a thread: a plan of FlashInfer takes 8 MiB of device memory."""

NAME: Final = "attnplug.attention"
"""The layer's name in messages."""


@frozen(eq=False)
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
    _impl: Attention = field(repr=False)
    _metadata: Metadata | None = field(repr=False)  # None where no query is given
    _shape: tuple[int, ...] = field(repr=False)  # of the output as the caller of `attention` gets it
    _rows: tuple[int, int] = field(repr=False)
    _return_lse: bool = field(repr=False)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """
        Attend.

        Args:
            query: ``(query tokens, num_q_heads, head_size)``, those of a batch one after another; the last axis is
                contiguous, as of the others.
            key: ``(key tokens, num_kv_heads, head_size)``.
            value: ``(key tokens, num_kv_heads, head_size_v)``.
            sinks: The sinks that it was prepared for.

        Returns:
            ``(query tokens, num_q_heads * head_size_v)``, contiguous; and the log-sum-exp
            ``(query tokens, num_q_heads)`` float32, or None.

        Raises:
            TensorError: A tensor is another one than it was prepared for.
        """
        impl, output, lse = self._impl, query.new_empty(self._rows), None
        if self._return_lse:
            lse = query.new_empty((self._rows[0], impl.num_q_heads), dtype=torch.float32)
        if self._metadata is not None:
            impl.forward(query, key, value, None, self._metadata, output, lse=lse)
        if lse is not None and sinks is not None and impl.lse_includes_sink is False:
            torch.logaddexp(lse, sinks.detach().float(), out=lse)
        return output, lse

    def run_shaped(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `run` does, and return the results in the shapes of `attention`."""
        output, lse = self.run(query, key, value, sinks)
        return output.view(self._shape), None if lse is None else lse.view(self._shape[:-1])


_calls: Final[DecisionCache[PreparedAttention]] = DecisionCache(_MOST, per_thread=True)
_lengths: Final[DecisionCache[tuple[int, ...]]] = DecisionCache(_MOST, per_thread=True, scoped=False)


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
    return prepared.run_shaped(_packed(query), _packed(key), _packed(value), tensors.sinks)


def prepare_padded(
    query: Tensor, key: Tensor, value: Tensor, params: CallParams, tensors: CallTensors
) -> PreparedAttention:
    """Return what `run_padded` runs on, on the current device: kept from a call of this shape, or made and kept."""
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse_capture()
    shape, sources = query.shape, () if tensors is NO_TENSORS else tensors
    where = _calls.key((shape, key.shape, value.shape, query.dtype, params), query.device, sources)
    prepared = _calls.find(where, sources)
    if prepared is None:
        check_tensors(query, key, value, "(batch, tokens, heads, head_size)")
        batch, queries, keys = shape[0], shape[1], key.shape[1]
        if params.causal:
            check_causal(queries, keys, "were given")
        sizes = (batch, queries, keys)
        mask = None if tensors.mask is None else flat_mask(tensors.mask, 1, sizes, query)
        bias = None if tensors.bias is None else flat_mask(tensors.bias, shape[2], sizes, query)
        lengths = ([queries] * batch, [keys] * batch)
        prepared = _prepare((query, key, value), params, tensors, lengths, (mask, bias))
        _calls.keep(where, prepared, sources)
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
    return prepared.run_shaped(_plain_rows(query), _plain_rows(key), _plain_rows(value), tensors.sinks)


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
    sources = () if tensors is NO_TENSORS else tensors
    where = _calls.key((sizes, query.dtype, params), query.device, sources)
    prepared = _calls.find(where, sources)
    if prepared is None:
        check_tensors(query, key, value, "(tokens, heads, head_size)")
        check_lengths(query_lens, key_lens, query.shape[0], key.shape[0])
        for one, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
            if params.causal:
                check_causal(queries, keys, f"were given for sequence {one}")
        mask, bias = (None if one is None else one.detach() for one in (tensors.mask, tensors.bias))
        lengths = (list(query_lens), list(key_lens))
        prepared = _prepare((query, key, value), params, tensors, lengths, (mask, bias))
        _calls.keep(where, prepared, sources)
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
    return _lengths.get(None, source.device, lambda: lengths_between(name, source), (source,))


def _prepare(
    inputs: tuple[Tensor, Tensor, Tensor],
    params: CallParams,
    tensors: CallTensors,
    lengths: tuple[list[int], list[int]],
    masks: tuple[Tensor | None, Tensor | None],
) -> PreparedAttention:
    """Decide, load, and build the metadata of a checked call."""
    device = inputs[0].device
    requirements = requirements_of(*inputs, params, tensors, is_cross=lengths[0] != lengths[1])
    # Tensors that are made in inference mode could not be written outside of it.
    with outside_inference_mode():
        planner = planner_of(requirements, device, params, (tensors.sinks, tensors.alibi_slopes), NAME)
        metadata = planner.build(_batch(lengths, params, masks, device)) if any(lengths[0]) else None
    return PreparedAttention(
        id=planner.impl.backend.id,
        impl=planner.impl,
        metadata=metadata,
        shape=(*inputs[0].shape[:-1], inputs[2].shape[-1]),
        rows=(sum(lengths[0]), planner.impl.output_width),
        return_lse=params.return_lse,
    )


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


def _packed(padded: Tensor) -> Tensor:
    return padded.flatten(0, 1) if padded.is_contiguous() else _plain_rows(padded).flatten(0, 1)


def _plain_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, as kernels take it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
