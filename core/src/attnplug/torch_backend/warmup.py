"""Runs a step of zeros, so that what it compiles is compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.batch import PAD_SLOT_ID, Batch
from attnplug.contract.dtypes import torch_dtype
from attnplug.contract.layer import Layer
from attnplug.contract.limits import Limits

if TYPE_CHECKING:
    from attnplug.contract.backend import Backend
    from attnplug.contract.state import GraphKey


def run_zeros(backend: Backend, shape: GraphKey) -> None:
    """Build and run one step of this shape, on a cache of its own that is dropped again."""
    asked = backend.agreement.requirements
    lens = _lens(shape)
    sinks = torch.zeros(asked.num_q_heads, device=backend.device) if asked.sinks else None
    impl = backend.make_impl(Layer(name="warmup", sinks=sinks))
    most = max(lens)
    limits = Limits(max_num_reqs=len(lens), max_num_tokens=sum(lens), max_seq_len=most + 1)
    builder = backend.make_builder([impl], backend.make_state(limits))
    pages, batch = None, Batch.from_lengths(lens, device=backend.device, causal=bool(asked.causal))
    if asked.paged:
        pages = backend.make_cache(2)
        batch = _paged_batch(backend, lens)
    query, key, value = (
        torch.zeros(sum(lens), heads, size, dtype=torch_dtype(asked.dtype), device=backend.device)
        for heads, size in (
            (asked.num_q_heads, asked.head_size),
            (asked.num_kv_heads, asked.head_size),
            (asked.num_kv_heads, impl.head_size_v),
        )
    )
    output = query.new_empty(sum(lens), impl.output_width)
    impl.forward(query, key, value, pages, builder.build(batch), output)


def _lens(shape: GraphKey) -> list[int]:
    """Decodes first, as in every batch: where lengths differ, the last request has what the others leave."""
    if shape.query_len is not None:
        return [shape.query_len] * shape.num_reqs
    even = max(1, shape.num_tokens // shape.num_reqs)
    return [even] * (shape.num_reqs - 1) + [max(1, shape.num_tokens - even * (shape.num_reqs - 1))]


def _paged_batch(backend: Backend, lens: list[int]) -> Batch:
    """A batch whose requests have a token of context, all of them in block 1, and write nothing."""
    size = backend.agreement.block_size or 1
    columns = -(-(max(lens) + 1) // size)
    return Batch.from_lengths(
        lens,
        [length + 1 for length in lens],
        block_table=torch.ones(len(lens), columns, dtype=torch.int32),
        slot_mapping=torch.full((sum(lens),), PAD_SLOT_ID, dtype=torch.int64),
        device=backend.device,
        causal=bool(backend.agreement.requirements.causal),
    )
