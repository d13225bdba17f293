"""The state of a host's layers: it checks limits and ranks against the pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import State
from attnplug.errors import LimitsError
from attnplug_blocksparse.pattern import BlocksparseParams

if TYPE_CHECKING:
    import torch

    from attnplug.contract import Backend, Limits, Parallel


class BlocksparseState(State):
    """Refuses limits and ranks that the pattern does not cover."""

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        super().__init__(backend, limits, device, parallel)
        params_of(backend, limits, self.parallel)


def params_of(backend: Backend, limits: Limits, parallel: Parallel) -> BlocksparseParams:
    """
    Return the pattern of a backend's layers on a rank.

    Args:
        backend: The backend whose agreement has the pattern. Backends with different patterns may share a state.
        limits: The limits of batches.
        parallel: The ranks.

    Raises:
        LayerError: The pattern is invalid, or not the layer's.
        LimitsError: Sequences may grow longer than the pattern covers, or the ranks do not fit it.
    """
    requested = backend.agreement.requirements
    params = BlocksparseParams.of(
        dict(requested.block_sparse or {}),
        num_heads=requested.num_q_heads,
        num_kv_heads=requested.num_kv_heads,
        tp_size=parallel.tp_size,
        tp_rank=parallel.tp_rank,
    )
    if limits.max_seq_len > params.max_seqlen:
        raise LimitsError(
            f"max_seq_len={limits.max_seq_len} exceeds the pattern",
            f"the pattern covers {params.max_seqlen} tokens (max_seqlen)",
            f"pass max_seq_len={params.max_seqlen}, or select with a pattern that covers more",
        )
    return params
