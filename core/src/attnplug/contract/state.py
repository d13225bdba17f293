"""What outlives a step: one state per backend, variant and device, which owns the workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from attnplug.contract.limits import Parallel

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.backend import Backend
    from attnplug.contract.limits import Limits


@frozen
class GraphKey:
    """
    The shape of a batch that is prepared ahead, for warm-up and capture.

    Attributes:
        num_reqs: Requests.
        num_tokens: Query tokens.
        query_len: The query length that all requests share; None where they differ.
    """

    num_reqs: int
    num_tokens: int
    query_len: int | None = None


class State:
    """
    Owns the workspace that all builders of one backend share. Plugins subclass it for what else must outlive a step.

    Attributes:
        backend: The backend that it serves.
        limits: The most that batches will need.
        parallel: The ranks that share the model.
        device: Where it lives.
    """

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.device = device
        self.parallel = Parallel() if parallel is None else parallel
        self._workspace: Tensor | None = None

    @property
    def workspace(self) -> Tensor:
        """``(workspace_bytes,)`` uint8, zero at first use, then shared by builders and forwards in stream order."""
        if self._workspace is None:
            size = self.backend.workspace_bytes(self.limits)
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._workspace
