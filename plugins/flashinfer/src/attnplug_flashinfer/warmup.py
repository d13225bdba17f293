"""Warm-up, which compiles every kernel, and the profiling run, which allocates peak memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract import Batch, Limits, dummy_batch_of, torch_dtype, warm_up
from attnplug_flashinfer import library
from attnplug_flashinfer.arrays import rows_of_dense
from attnplug_flashinfer.kinds import make_kind
from attnplug_flashinfer.routes import kind_of_profile, routes_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug.contract import AttentionImpl, LoadedBackend


def run_each_kind(backend: LoadedBackend) -> None:
    """Run a dummy request of each kind of wrapper, and a merge for cascade attention."""
    required, device = backend.agreement.requirements, backend.device
    lens = _query_lens(backend.agreement) if required.paged else [2]
    warm_up(backend, [dummy_batch_of(backend.agreement, device, lens)])
    if required.cascade:
        dtype = torch_dtype(required.dtype)
        rows = torch.zeros(sum(lens), required.num_q_heads, required.head_size, dtype=dtype, device=device)
        sums = torch.zeros(sum(lens), required.num_q_heads, device=device)
        library.merge(rows, sums, rows.clone(), sums.clone())


def _query_lens(agreement: Agreement) -> list[int]:
    """Return one row for decodes, then a padded request, which ends them, then the rows of each other kind."""
    required = agreement.requirements
    longest = required.decode_query_len + ("prefill" in required.phases)
    return [1, 0, *(min(route.longest, longest) for route in routes_of(agreement) if route.kind != "decode")]


def run_dense(impl: AttentionImpl, query: Tensor, key: Tensor, value: Tensor | None, output: Tensor) -> None:
    """
    Attend to the K/V as one sequence, in a workspace of the agreed size that is freed afterwards.

    The kernels for attention sinks and for latents read pages only: their wrapper and its workspace are made, and not
    run.

    Args:
        impl: The layer.
        query: ``(tokens, num_q_heads, head_size)``, at least one token.
        key: ``(rows, num_kv_heads, head_size)``, at least one row.
        value: ``(rows, num_kv_heads, head_size_v)``; None for latents.
        output: ``(tokens, num_q_heads * head_size_v)``, written if it is contiguous.
    """
    rows = min(query.shape[0], key.shape[0])
    limits = Limits(max_num_reqs=1, max_num_tokens=rows, max_seq_len=key.shape[0])
    workspace = torch.zeros(impl.backend.workspace_bytes(limits), dtype=torch.uint8, device=query.device)
    kind = make_kind(kind_of_profile(impl.agreement), impl, workspace)
    wrapper = kind.make(None)
    if impl.layer.sinks is not None or value is None:
        return
    batch = Batch.from_lengths([rows], [key.shape[0]], causal=impl.causal)
    kind.plan(wrapper, rows_of_dense(batch).parts[0])
    out = output[:rows].view(rows, impl.num_q_heads, impl.head_size_v) if output.is_contiguous() else None
    wrapper.run(query[:rows], key, value, out=out)
