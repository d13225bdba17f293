"""
What packed calls run on: a backend for each kind of call, and for a paged KV cache an implementation and its metadata.

torch does not say which layer calls. Layers of one kind and scale share an implementation, in a thread and a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch
from attrs import frozen

import attnplug
from attnplug.dense import BatchPlanner, DecisionCache, prepare_attention_varlen, use_device
from attnplug.errors import TensorError
from attnplug_torch.decisions import RefusedError, decide
from attnplug_torch.measured import FASTER_PACKED

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import LoadedBackend
    from attnplug_torch.visibility import Visibility


@frozen(eq=False, kw_only=True)
class PackedCall:
    """
    A call of `varlen_attn`, as a backend takes it.

    Attributes:
        query: ``(query tokens, num_q_heads, head_size)``.
        key: ``(key tokens, num_kv_heads, head_size)``, or the pool of a paged KV cache.
        value: As `key`.
        query_start_loc: ``(sequences + 1,)`` int32.
        key_start_loc: The same of the keys; None for a paged KV cache.
        max_query_len: The longest query, or an upper bound.
        max_seq_len: The longest sequence of keys, likewise.
        visibility: What a query attends to.
        scale: Factor of the scores.
        seq_lens: ``(sequences,)`` int32, the keys of each sequence that are used; None for all.
        alibi_slopes: ``(num_q_heads,)`` float32, or None.
        block_table: ``(sequences, blocks)`` int32, or None.
        max_num_splits: Most parts of one sequence's keys; None for the backend's own choice.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor | None
    max_query_len: int
    max_seq_len: int
    visibility: Visibility
    scale: float | None = None
    seq_lens: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_table: Tensor | None = None
    max_num_splits: int | None = None


_LARGEST: Final = 256
"""The largest heads of torch's own flash attention (FlashAttention 2)."""


def backend_of(call: PackedCall) -> LoadedBackend:
    """
    Return the backend for a call.

    Raises:
        RefusedError: Torch's own operator has to serve it.
        NoBackendError: The backend that was named does not.
    """
    query, key, value = call.query, call.key, call.value
    paged = call.block_table is not None
    form = None
    if paged:
        if call.visibility.window is not None and not call.visibility.causal:
            side = call.visibility.window - 1
            raise RefusedError(
                f"window_size=({side}, {side}) with a block_table: over pages, a window ends at its query"
            )
        # Two tensors: one shape and stride for both is what most kernels take.
        form = "independent" if key.shape == value.shape and key.stride() != value.stride() else "split"
    is_cross = not (call.visibility.causal or paged) and not _are_equal(call.query_start_loc, call.key_start_loc)
    kinds = (call.visibility, call.alibi_slopes is not None, paged, form, key.shape[1] if paged else 0, is_cross)
    sizes = (query.shape[1], key.shape[-2], query.shape[2], value.shape[-1])
    return decide(
        ("packed", query.dtype, sizes, kinds),
        query.device,
        lambda: _requirements(call, form, is_cross),
        has_flash=lambda: _has_flash(call),
        keys=call.max_seq_len,
        rows=FASTER_PACKED,
    )


def _has_flash(call: PackedCall) -> bool:
    """Return whether torch's own operator serves a call on CUDA, by the FlashAttention 2 that is part of torch."""
    query, value = call.query, call.value
    size = query.shape[2]
    return (
        query.is_cuda
        and call.block_table is None
        and query.dtype in {torch.float16, torch.bfloat16}
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= _LARGEST
        and torch.version.hip is None  # capabilities of AMD devices are those of other instruction sets
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _are_equal(starts: Tensor, key_starts: Tensor | None) -> bool:
    """Return whether queries and keys have the same lengths. It waits for the device."""
    return key_starts is None or starts is key_starts or torch.equal(starts, key_starts)


def _requirements(call: PackedCall, form: str | None, is_cross: bool) -> attnplug.Requirements:  # noqa: FBT001
    """Return what a call requires; without a block table, what `attention_varlen` requires for it."""
    causal, window = call.visibility
    common: dict[str, Any] = {
        "head_size": call.query.shape[2],
        "num_q_heads": call.query.shape[1],
        "num_kv_heads": call.key.shape[-2],
        "dtype": str(call.query.dtype),
        "head_size_v": call.value.shape[-1],
        "sliding_window": window,
        "return_lse": True,
    }
    if form is None:
        attn_type = "decoder" if causal else "encoder_decoder" if is_cross else "encoder_only"
        alibi = None if call.alibi_slopes is None else "linear"
        return attnplug.Requirements(**common, attn_type=attn_type, alibi=alibi, paged=False, phases=("prefill",))
    return attnplug.Requirements(
        **common,
        causal=causal,
        block_size=call.key.shape[1],
        kv_layout="NHD",
        kv_cache_form=form,
        kv_in_cache=True,  # the caller has written them
        seq_lens_cpu_kind="absent",  # each build reads them from the device
        query_lens_cpu_kind="absent",
    )


_planners: Final[DecisionCache[BatchPlanner]] = DecisionCache(64, per_thread=True)
_served: Final[DecisionCache[str]] = DecisionCache(per_thread=True)
"""The candidate that has served a kind of packed calls: these need no decision of this host."""


def attend_packed(call: PackedCall) -> tuple[str, Tensor, Tensor]:
    """
    Attend in packed sequences.

    Returns:
        The candidate that ran, the output ``(tokens, heads, size)``, and the LSE ``(tokens, heads)`` float32.

    Raises:
        TensorError: The start locations do not fit the tensors.
    """
    query, key, value = call.query, call.key, call.value
    sizes = (query.shape[1:], key.shape[1:], value.shape[1:])
    short = FASTER_PACKED.keys_of(call.max_seq_len)
    kind = _served.key((sizes, query.dtype, call.visibility, short), query.device)
    if _served.find(kind) is None:
        backend_of(call)
    causal, window = call.visibility
    with use_device(query.device):
        prepared = prepare_attention_varlen(
            query,
            key,
            value,
            call.query_start_loc,
            call.key_start_loc,
            causal=causal,
            sliding_window=window,
            scale=call.scale,
            return_lse=True,
        )
        output, lse = prepared.run(_plain(query), _plain(key), _plain(value))
    _served.keep(kind, prepared.id)
    return prepared.id, output.view(*query.shape[:2], value.shape[2]), cast("Tensor", lse)


def attend_pages(call: PackedCall) -> tuple[str, Tensor, Tensor]:
    """
    Attend to a paged KV cache of two tensors, which are read where they are, and not written.

    Returns:
        The candidate that ran, the output ``(tokens, heads, size)``, and the LSE ``(tokens, heads)`` float32.

    Raises:
        CacheError: A block is outside of the pool; where the block table is on the CPU.
        TensorError: `query_start_loc` is on the CPU, and does not end at the number of query tokens.
    """
    seq_lens = call.seq_lens
    if seq_lens is None:
        raise RefusedError("block_table without seqused_k: the lengths of the sequences are not known")
    starts = call.query_start_loc
    if starts.is_cpu and (starts.ndim != 1 or int(starts[-1:].sum()) != call.query.shape[0]):
        raise TensorError(
            f"cu_seq_q={starts.tolist()} was given for a query of {call.query.shape[0]} tokens",
            "its last entry is the number of query tokens",
            "pass the queries of all sequences, and of no other",
        )
    batch = attnplug.Batch(
        query_start_loc=call.query_start_loc,
        query_start_loc_cpu=None,
        seq_lens=seq_lens,
        seq_lens_cpu=None,
        num_reqs=call.query_start_loc.shape[0] - 1,
        num_actual_tokens=call.query.shape[0],
        max_query_len=call.max_query_len,
        max_seq_len=call.max_seq_len,
        block_table=call.block_table,
        causal=call.visibility.causal,
    )
    return _run(call, batch)


def attend_split(call: PackedCall) -> tuple[str, Tensor, Tensor]:
    """
    Attend in packed sequences with a limit of splits, which `attnplug.attention_varlen` does not have.

    Returns:
        As for `attend_pages`.

    Raises:
        LimitsError: The backend keeps no such limit.
    """
    query_lens = call.query_start_loc.diff().tolist()
    key_lens = query_lens if call.key_start_loc is None else call.key_start_loc.diff().tolist()
    batch = attnplug.Batch.from_lengths(query_lens, key_lens, device=call.query.device, causal=call.visibility.causal)
    return _run(call, batch)


def _run(call: PackedCall, batch: attnplug.Batch) -> tuple[str, Tensor, Tensor]:
    backend = backend_of(call)
    query, (tokens, heads, _) = call.query, call.query.shape
    output = query.new_empty(tokens, heads * call.value.shape[-1])
    lse = query.new_empty(tokens, heads, dtype=torch.float32)
    with use_device(query.device):
        if batch.num_reqs and tokens:
            planner = _planner(backend, query.device, call.scale, call.max_num_splits)
            paged = call.block_table is not None
            pages = {"k": call.key, "v": call.value}
            cache = planner.impl.backend.bind_cache(pages, null_block=False) if paged else None
            key, value = (None, None) if paged else (_plain(call.key), _plain(call.value))
            metadata = planner.build(batch)
            planner.impl.forward(_plain(query), key, value, cache, metadata, output, lse=lse)
    return backend.id, output.view(tokens, heads, call.value.shape[-1]), lse


def _planner(
    backend: LoadedBackend, device: torch.device, scale: float | None, max_num_splits: int | None
) -> BatchPlanner:
    def make() -> BatchPlanner:
        impl = backend.make_impl(attnplug.Layer(name="torch.nn.attention", scale=scale))
        return BatchPlanner(backend, impl, max_num_splits=max_num_splits)

    return _planners.get((backend, scale, max_num_splits), device, make)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, as kernels take it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
