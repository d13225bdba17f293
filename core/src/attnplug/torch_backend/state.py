"""What outlives a step of the variant `flex`: the contract's own, and one limit that is not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract.state import State
from attnplug.errors import LimitsError

if TYPE_CHECKING:
    import torch

    from attnplug.contract.backend import Backend
    from attnplug.contract.limits import Limits, Parallel


class FlexState(State):
    """
    Refuses a bound of splits. The variant `sdpa` keeps any: it cuts no request's keys.

    Raises:
        LimitsError: `Limits.max_num_splits` is given.
    """

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        if limits.max_num_splits is not None:
            raise LimitsError(
                f"max_num_splits={limits.max_num_splits} was given",
                "compiled FlexAttention decides by itself how many pieces a request's keys are cut into",
                "leave max_num_splits out, or choose torch/sdpa, which cuts none",
            )
        super().__init__(backend, limits, device, parallel)
