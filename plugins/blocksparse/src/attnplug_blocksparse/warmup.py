"""Runs one tiny step of each kind, so that what compiles at its first use is compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, Batch, Layer, Limits, Parallel, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_blocksparse.backend import BlocksparseBackend


def run_each_kernel(backend: BlocksparseBackend) -> None:
    """Run decodes, prompts in one piece and chunks, short and long; all keys are in the null block."""
    asked = backend.agreement.requirements
    impl = backend.make_impl(Layer(name="warmup"))
    cache = backend.make_cache(2) if asked.paged else None
    dtype, device = torch_dtype(asked.dtype), backend.device
    for batch in _batches(backend):
        tokens = batch.num_actual_tokens
        limits = Limits(max_num_reqs=batch.num_reqs, max_num_tokens=tokens, max_seq_len=batch.max_seq_len)
        builder = backend.make_builder([impl], backend.make_state(limits, _a_rank(backend)))
        query = torch.zeros(tokens, asked.num_q_heads, asked.head_size, dtype=dtype, device=device)
        key = torch.zeros(tokens, asked.num_kv_heads, asked.head_size, dtype=dtype, device=device)
        lse = torch.empty(tokens, asked.num_q_heads, device=device) if asked.return_lse else None
        impl.forward(query, key, key.clone(), cache, builder.build(batch), torch.empty_like(query.flatten(1)), lse=lse)


def _a_rank(backend: BlocksparseBackend) -> Parallel:
    """Some rank of as many as hold the model's KV heads: which one is a number that kernels take, not one in them."""
    asked = backend.agreement.requirements
    total = dict(asked.block_sparse or {}).get("total_kv_heads") or asked.num_kv_heads
    return Parallel(tp_size=max(1, total // asked.num_kv_heads))


def _batches(backend: BlocksparseBackend) -> Iterator[Batch]:
    asked, device = backend.agreement.requirements, backend.device
    if not asked.paged:
        yield Batch.from_lengths([2], device=device)
        return
    size, most = backend.agreement.block_size or 1, dict(asked.block_sparse or {})["max_seqlen"]
    steps = []
    if "decode" in asked.phases:
        steps += [([1], [length]) for length in sorted({1, int(most)})]  # in one part, and in as many as there are
    if "prefill" in asked.phases:
        steps += [([2], [2]), ([2], [3])]
        long = backend.builder_class.worth_a_launch
        steps += [([long], [long])] if backend.has_descriptors else []
        steps += [([long], [long + 1])] if backend.hopper_tiles is not None else []
    for query_lens, seq_lens in steps:
        if max(seq_lens) > most:
            continue
        batch = Batch.from_lengths(
            query_lens,
            seq_lens,
            block_table=torch.zeros(1, -(-max(seq_lens) // size), dtype=torch.int32),
            slot_mapping=torch.full((sum(query_lens),), PAD_SLOT_ID, dtype=torch.int64),
            device=device,
            causal=True,
        )
        yield evolve(batch, dummy=True)
