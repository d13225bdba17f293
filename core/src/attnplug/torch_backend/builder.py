"""Plans a batch once per step for all layers of a cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.contract.builder import MetadataBuilder
from attnplug.errors import BatchError
from attnplug.torch_backend.planner import make_plan
from attnplug.torch_backend.shape import Shape, bytes_per_key, shape_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from attnplug.contract.backend import Backend
    from attnplug.contract.batch import Batch
    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.metadata import Metadata
    from attnplug.contract.state import State


class TorchBuilder(MetadataBuilder):
    """Makes one `Plan` per plan key: the kernel calls of a step, with every index and mask that they need."""

    def __init__(self, backend: Backend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        keys = state.workspace.numel() // bytes_per_key(self.agreement) or None
        self._shapes: dict[Hashable, Shape] = {
            key: shape_of(self.agreement, group[0].window, backend.device.type, keys)
            for key, group in self.plan_groups.items()
        }

    def _build(self, batch: Batch, *, fast: bool, slot: Any) -> Metadata:
        del fast, slot
        self._check_encoder(batch)
        device = batch.query_start_loc.device
        plans = {key: make_plan(shape, batch, device) for key, shape in self._shapes.items()}
        return self.describe(batch, plans=plans, workspace=self.state.workspace)

    def _check_encoder(self, batch: Batch) -> None:
        """Keys are gathered into a workspace that holds `max_seq_len` of them per request, whoever they come from."""
        lens, most = batch.encoder_seq_lens_cpu, self.limits.max_seq_len
        if lens is not None and int(lens.max()) > most:
            raise BatchError(
                f"an encoder_seq_lens of up to {int(lens.max())} was given",
                f"the state was made for max_seq_len={most}, which counts the keys of a request: here the encoder's",
                f"make the state with Limits(max_seq_len={int(lens.max())}, ...) or more",
            )
