"""Runs steps of zeros, so that what a backend compiles at its first use is compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.contract.inputs.kv_cache import torch_dtype
from attnplug.contract.inputs.layer import Layer
from attnplug.contract.inputs.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnplug.contract.attention import Attention
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.kv_cache import KVCache
    from attnplug.contract.inputs.limits import Parallel
    from attnplug.contract.loaded import LoadedBackend


def warm_up(
    backend: LoadedBackend,
    batches: Iterable[Batch],
    *,
    layer: Layer | None = None,
    kv_cache: KVCache | None = None,
    parallel: Parallel | None = None,
) -> None:
    """
    Build and run a step of zeros for each batch. What is made for it is discarded: layer, KV cache, states, builders.

    `Backend.warmup` calls it with the `LoadedBackend` that it is given, and a batch for each kernel that compiles. An
    LSE is computed where it was negotiated. With `kv_in_cache` each step runs without K/V too. With `topk` each token
    selects the null block's first slot, in steps with and without `index_lens`.

    Args:
        backend: The backend.
        batches: Batches that write no slot and read the null block only, of `Backend.dummy_batch` or `dummy_batch_of`.
        layer: The layer; None is `dummy_layer`. With a `kv_sharing_target` it is run without K/V.
        kv_cache: Its KV cache of 2 blocks; None is a fresh one.
        parallel: The rank that is run; None is a single one.
    """
    requested = backend.agreement.requirements
    impl = backend.make_impl(dummy_layer(backend) if layer is None else layer)
    if kv_cache is None and requested.paged:
        kv_cache = backend.make_cache(2, impl=impl)
    for batch in batches:
        tokens = batch.num_actual_tokens
        limits = Limits(max_num_reqs=batch.num_reqs, max_num_tokens=tokens, max_seq_len=batch.max_seq_len)
        builder = backend.make_builder([impl], backend.make_state(limits, parallel))
        query = torch.zeros(tokens, impl.num_q_heads, impl.head_size, dtype=impl.query_dtype, device=impl.device)
        key = _rows(impl, tokens, impl.head_size)
        value = None if requested.latent else _rows(impl, tokens, impl.head_size_v)
        output = torch.empty(tokens, impl.output_width, dtype=impl.output_dtype, device=impl.device)
        lse = torch.empty(tokens, impl.num_q_heads, device=impl.device) if requested.return_lse else None
        metadata = builder.build(batch)
        for selection in _selections(impl, tokens):
            impl.forward(query, key, value, kv_cache, metadata, output, lse=lse, **selection)
            if requested.kv_in_cache:
                impl.forward(query, None, None, kv_cache, metadata, output, lse=lse, **selection)


def dummy_layer(backend: LoadedBackend, name: str = "warm_up") -> Layer:
    """Return a layer with the tensors that the requirements name: sinks and slopes of 0, scales of 1 per head."""
    requested, device = backend.agreement.requirements, backend.device
    scales: dict[str, Any] = {}
    if requested.per_head_scales:
        ones = torch.ones(requested.num_kv_heads, device=device)
        scales = {f"{one}_scale_tensor": ones for one in backend.impl_class.static_scales}
    return Layer(
        name=name,
        scale=requested.head_size**-0.5 if requested.latent else None,
        sinks=torch.zeros(requested.num_q_heads, device=device) if requested.sinks else None,
        alibi_slopes=torch.zeros(requested.num_q_heads, device=device) if requested.alibi else None,
        **scales,
    )


def _selections(impl: Attention, tokens: int) -> tuple[dict[str, Tensor], ...]:
    topk = impl.agreement.requirements.topk
    if topk is None:
        return ({},)
    indices = torch.full((tokens, topk), -1, dtype=torch.int32, device=impl.device)
    indices[:, 0] = 0
    return {"indices": indices}, {"indices": indices, "index_lens": torch.ones_like(indices[:, 0])}


def _rows(impl: Attention, tokens: int, size: int) -> Tensor | None:
    """Return K or V of zeros; None for a layer that reads the KV cache of another."""
    if impl.layer.kv_sharing_target is not None:
        return None
    dtype = torch_dtype(impl.agreement.requirements.dtype)
    return torch.zeros(tokens, impl.num_kv_heads, size, dtype=dtype, device=impl.device)
