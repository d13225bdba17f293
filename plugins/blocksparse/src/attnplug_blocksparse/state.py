"""What outlives a step: the workspace of partial results, and the limits that the pattern sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import State
from attnplug.errors import LimitsError

if TYPE_CHECKING:
    import torch

    from attnplug.contract import Backend, Limits, Parallel


class BlocksparseState(State):
    """Refuses, where limits are given, sequences that the pattern does not cover."""

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        super().__init__(backend, limits, device, parallel)
        most = dict(backend.agreement.requirements.block_sparse or {}).get("max_seqlen")
        if isinstance(most, int) and limits.max_seq_len > most:
            raise LimitsError(
                f"max_seq_len={limits.max_seq_len} was given",
                f"the pattern covers {most} tokens (max_seqlen)",
                f"pass max_seq_len={most}, or select with a pattern that covers more",
            )
