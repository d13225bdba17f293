"""Runs a step of zeros, so that what it compiles is compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.graphs.dummy import dummy_batch
from attnplug.contract.inputs.kv_cache import torch_dtype
from attnplug.contract.inputs.layer import Layer
from attnplug.contract.inputs.limits import Limits

if TYPE_CHECKING:
    from attnplug.contract.backend import Backend
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.request.requirements import Requirements


def run_zeros(backend: Backend, shape: GraphShape) -> None:
    """Build and run one step of this shape, on a cache of its own that is dropped again."""
    asked = backend.agreement.requirements
    batch = dummy_batch(backend.agreement, shape, backend.device)
    impl = backend.make_impl(_layer(asked, backend.device))
    tokens = batch.num_actual_tokens
    limits = Limits(max_num_reqs=batch.num_reqs, max_num_tokens=tokens, max_seq_len=batch.max_seq_len)
    builder = backend.make_builder([impl], backend.make_state(limits))
    pages = backend.make_cache(2) if asked.paged else None
    query, key, value = (
        torch.zeros(tokens, heads, size, dtype=torch_dtype(asked.dtype), device=backend.device)
        for heads, size in (
            (asked.num_q_heads, asked.head_size),
            (asked.num_kv_heads, asked.head_size),
            (asked.num_kv_heads, impl.head_size_v),
        )
    )
    output = query.new_empty(tokens, impl.output_width)
    impl.forward(query, key, value, pages, builder.build(batch), output)


def _layer(asked: Requirements, device: torch.device) -> Layer:
    """Return a layer with every tensor that was asked for."""
    scales = torch.ones(asked.num_kv_heads, device=device) if asked.per_head_scales else None
    return Layer(
        name="warmup",
        sinks=torch.zeros(asked.num_q_heads, device=device) if asked.sinks else None,
        alibi_slopes=torch.zeros(asked.num_q_heads, device=device) if asked.alibi else None,
        k_scale_tensor=scales,
        v_scale_tensor=scales,
    )
