"""What a profiling run measures: the memory of a step, without a cache and without a builder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract import Batch, Limits
from attnplug_flashinfer.arrays import rows_of_dense
from attnplug_flashinfer.kinds import make_kind
from attnplug_flashinfer.routes import kind_of_profile

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import AttentionImpl


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
