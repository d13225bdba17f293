"""What outlives a step: the contract's own, and one limit that the library does not keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import State
from attnplug.errors import LimitsError

if TYPE_CHECKING:
    import torch

    from attnplug.contract import Backend, Limits, Parallel


class FlashInferState(State):
    """
    Refuses a bound of splits.

    Raises:
        LimitsError: `Limits.max_num_splits` is given: the library's planner takes none.
    """

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        if limits.max_num_splits is not None:
            raise LimitsError(
                f"max_num_splits={limits.max_num_splits} was given",
                "FlashInfer's planner decides by itself how many pieces a request's keys are cut into",
                "leave max_num_splits out, or choose a backend that keeps it, such as flash_attn",
            )
        super().__init__(backend, limits, device, parallel)
