"""What outlives a step: the workspace of partial results, and the limits that the pattern sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import State
from attnplug.errors import LimitsError
from attnplug_blocksparse.params import BlocksparseParams

if TYPE_CHECKING:
    import torch

    from attnplug.contract import Backend, Limits, Parallel


class BlocksparseState(State):
    """Refuses, where limits and ranks are given, what the pattern does not cover."""

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        super().__init__(backend, limits, device, parallel)
        params_of(backend, limits, self.parallel)


def params_of(backend: Backend, limits: Limits, parallel: Parallel) -> BlocksparseParams:
    """
    Return the pattern of a backend's layers on a rank.

    Args:
        backend: Whose agreement names the pattern. States are shared by backends whose patterns differ.
        limits: The most that batches will need.
        parallel: The ranks.

    Raises:
        LayerError: The pattern is none, or not the layer's.
        LimitsError: Sequences may grow longer than the pattern covers, or the ranks do not fit it.
    """
    asked = backend.agreement.requirements
    params = BlocksparseParams.of(
        dict(asked.block_sparse or {}),
        num_heads=asked.num_q_heads,
        num_kv_heads=asked.num_kv_heads,
        tp_size=parallel.tp_size,
        tp_rank=parallel.tp_rank,
    )
    if limits.max_seq_len > params.max_seqlen:
        raise LimitsError(
            f"max_seq_len={limits.max_seq_len} was given",
            f"the pattern covers {params.max_seqlen} tokens (max_seqlen)",
            f"pass max_seq_len={params.max_seqlen}, or select with a pattern that covers more",
        )
    return params
