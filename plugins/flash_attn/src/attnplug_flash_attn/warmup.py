"""Warm-up: runs a small step of each kind, which compiles the kernels that are compiled at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from attrs import evolve

from attnplug.contract import Batch, dummy_batch_of, dummy_layer, torch_dtype, warm_up
from attnplug_flash_attn import dcp
from attnplug_flash_attn.kernels.interface import VarlenCall
from attnplug_flash_attn.passes import adapted, cumulative, leftpad_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attnplug import Requirements
    from attnplug.contract import AttentionImpl, Backend, KVCache, LoadedBackend
    from attnplug_flash_attn.backend import FlashAttentionBackend
    from attnplug_flash_attn.impl import FlashAttentionImpl


def run_each_pass(backend: FlashAttentionBackend, loaded: LoadedBackend) -> None:
    """
    Run decodes, prefills, and a shared prefix if requested. All keys are in the null block.

    With decode context parallelism, run the calls of this rank without communication.
    """
    required = backend.agreement.requirements
    if required.dcp_size > 1:
        impl = loaded.make_impl(dummy_layer(loaded)).wrapped
        _run_shard(backend, cast("FlashAttentionImpl", impl), loaded.make_cache(2))
    else:
        warm_up(loaded, _batches(backend))


def _run_shard(backend: FlashAttentionBackend, impl: FlashAttentionImpl, cache: KVCache) -> None:
    """Run the new tokens of two requests, and their cached tokens for the query heads of all ranks."""
    required, device = backend.agreement.requirements, backend.device
    lens = torch.tensor([1, 2], dtype=torch.int32, device=device)
    starts, tokens = cumulative(lens), 3
    key, value = (_zeros(impl, tokens, impl.num_kv_heads, size) for size in (impl.head_size, impl.head_size_v))
    key, value = dcp.as_cached(impl, key, value)
    new = VarlenCall(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=2, max_seqlen_k=2, num_splits=0)
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    cached = evolve(new, cu_seqlens_k=None, seqused_k=lens, block_table=table, causal=False)
    keys, values = cache.k, cache.v
    if backend.kernels.paged:
        context = adapted(cached, backend.kernels, leftpad_of(backend.kernels, 2, device))
    else:
        context = evolve(cached, cu_seqlens_k=starts, seqused_k=None, block_table=None)
        keys, values = key, value  # packed keys have the same form
    for heads, keys_of_call, values_of_call, call, params in (
        (impl.num_q_heads, key, value, new, impl.params),
        (impl.num_q_heads * required.dcp_size, keys, values, context, impl.params_without_sinks),
    ):
        query = _zeros(impl, tokens, heads, impl.head_size).to(keys.dtype)
        lse = torch.empty(tokens, heads, device=device)
        out = _zeros(impl, tokens, heads, impl.head_size_v)
        backend.kernels.attend(query, keys_of_call, values_of_call, out, call, params, lse)


def _batches(backend: Backend) -> Iterator[Batch]:
    required = backend.agreement.requirements
    agreement, device, size = backend.agreement, backend.device, backend.agreement.block_size or 1
    if not required.paged:
        yield dummy_batch_of(agreement, device, [2])
        return
    lens = _query_lens(required)
    # Prefills without cached keys may read the K/V of the call.
    yield dummy_batch_of(agreement, device, lens, lens)
    yield dummy_batch_of(agreement, device, lens, [length + 1 for length in lens])
    if required.cascade:
        yield dummy_batch_of(agreement, device, lens, [length + size for length in lens], common_prefix_len=size)


def _query_lens(required: Requirements) -> list[int]:
    """Return one row, as many as a decode may have, and one more for a prefill."""
    longest = required.decode_query_len
    return sorted({1, longest, longest + 1 if "prefill" in required.phases else 1})


def _zeros(impl: AttentionImpl, tokens: int, heads: int, size: int) -> Tensor:
    return torch.zeros(tokens, heads, size, dtype=torch_dtype(impl.agreement.requirements.dtype), device=impl.device)
