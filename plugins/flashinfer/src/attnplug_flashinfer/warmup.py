"""Runs one tiny step of each kind, so that what nvcc compiles is compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract import PAD_SLOT_ID, Batch, Layer, Limits, torch_dtype
from attnplug_flashinfer import library
from attnplug_flashinfer.arrays import rows_of_dense
from attnplug_flashinfer.kinds import make_kind
from attnplug_flashinfer.routes import kind_of_profile, routes_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug.contract import AttentionImpl, Backend


def run_each_kind(backend: Backend) -> None:
    """Run a request of each kind that the agreement has, and a merge for cascades."""
    asked = backend.agreement.requirements
    sinks = torch.zeros(asked.num_q_heads, device=backend.device) if asked.sinks else None
    impl = backend.make_impl(Layer(name="warmup", sinks=sinks))
    batch = _paged_batch(backend) if asked.paged else _dense_batch(backend)
    tokens = batch.num_actual_tokens
    limits = Limits(max_num_reqs=batch.num_reqs, max_num_tokens=tokens, max_seq_len=batch.max_seq_len)
    query = _zeros(impl, tokens, impl.num_q_heads)
    keys = _zeros(impl, tokens, impl.num_kv_heads)
    output = query.new_empty(tokens, impl.output_width)
    lse = torch.empty(tokens, impl.num_q_heads, device=query.device) if asked.return_lse else None
    cache = backend.make_cache(2) if asked.paged else None
    metadata = backend.make_builder([impl], backend.make_state(limits)).build(batch)
    impl.forward(query, keys, keys, cache, metadata, output, lse=lse)
    if asked.cascade:
        sums = torch.zeros(tokens, impl.num_q_heads, device=query.device)
        library.merge(query, sums, query.clone(), sums.clone())


def _paged_batch(backend: Backend) -> Batch:
    """All pages are the null block, and no row has a slot."""
    lens = _query_lens(backend.agreement)
    size = backend.agreement.block_size or 1
    return Batch.from_lengths(
        lens,
        block_table=torch.zeros(len(lens), -(-max(lens) // size), dtype=torch.int32),
        slot_mapping=torch.full((sum(lens),), PAD_SLOT_ID, dtype=torch.int64),
        device=backend.device,
        causal=bool(backend.agreement.requirements.causal),
        dummy=True,
    )


def _dense_batch(backend: Backend) -> Batch:
    return Batch.from_lengths([2], device=backend.device, causal=bool(backend.agreement.requirements.causal))


def _query_lens(agreement: Agreement) -> list[int]:
    """One row, and behind a padded request, which decodes leave to others, a request for each other kind."""
    asked = agreement.requirements
    longest = asked.decode_query_len + ("prefill" in asked.phases)
    return [1, 0, *(min(route.longest, longest) for route in routes_of(agreement) if route.kind != "decode")]


def _zeros(impl: AttentionImpl, tokens: int, heads: int) -> torch.Tensor:
    dtype = torch_dtype(impl.agreement.requirements.dtype)
    return torch.zeros(tokens, heads, impl.head_size, dtype=dtype, device=impl.device)


def run_dense(impl: AttentionImpl, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    """
    Attend the given K/V as one sequence, in a workspace of the agreed size that is dropped again.

    The kernels with sinks read pages only. Their wrapper is made, workspace and all, and not run.

    Args:
        impl: The layer.
        query: ``(tokens, num_q_heads, head_size)``, a token or more.
        key: ``(rows, num_kv_heads, head_size)``, a row or more.
        value: As `key`.
        output: ``(tokens, num_q_heads * head_size)``; written where it is contiguous.
    """
    rows = min(query.shape[0], key.shape[0])
    limits = Limits(max_num_reqs=1, max_num_tokens=rows, max_seq_len=key.shape[0])
    workspace = torch.zeros(impl.backend.workspace_bytes(limits), dtype=torch.uint8, device=query.device)
    kind = make_kind(kind_of_profile(impl.agreement), impl, workspace)
    wrapper = kind.make(None)
    if impl.layer.sinks is not None:
        return
    batch = Batch.from_lengths([rows], [key.shape[0]], causal=impl.causal)
    kind.plan(wrapper, rows_of_dense(batch).parts[0])
    out = output[:rows].view(rows, impl.num_q_heads, impl.head_size) if output.is_contiguous() else None
    wrapper.run(query[:rows], key, value, out=out)
