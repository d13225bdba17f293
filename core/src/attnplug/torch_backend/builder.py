"""Plans a batch once per step for all layers of a cache group."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Final

from attnplug.contract.builder import MetadataBuilder
from attnplug.torch_backend.captured import CapturedPlan
from attnplug.torch_backend.planner import make_plan
from attnplug.torch_backend.shape import Shape, bytes_per_key, shape_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from attnplug.contract.backend import Backend
    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.state import State
    from attnplug.torch_backend.plan import Plan


_SHORTEST: Final = 256
_CAPTURED_KEYS: Final = 2**22  # the slot numbers of so many keys take 32 MiB, in each captured shape


class TorchBuilder(MetadataBuilder):
    """Makes one `Plan` per plan key: the kernel calls of a step, with every index and mask that they need."""

    supports_graphs = True

    def __init__(self, backend: Backend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        keys = state.workspace.numel() // bytes_per_key(self.agreement) or None
        self._shapes: dict[Hashable, Shape] = {
            key: shape_of(self.agreement, group[0].window, backend.device.type, keys)
            for key, group in self.plan_groups.items()
        }

    @property
    def graph_lengths(self) -> tuple[int, ...]:
        """A captured forward gathers and masks as many keys as its longest sequence may have: lengths double."""
        most = min(self.limits.max_seq_len, max(_SHORTEST, _CAPTURED_KEYS // self.limits.max_num_reqs))
        lengths = takewhile(lambda length: length < most, (_SHORTEST << power for power in count()))
        return (*lengths, most)

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Make one plan per plan key; those of a graph are written into its buffers."""
        del split, fast
        return {"plans": {key: self._plan(key, shape, batch, graph) for key, shape in self._shapes.items()}}

    def _plan(self, key: Hashable, shape: Shape, batch: Batch, graph: GraphBuffers | None) -> Plan:
        device = batch.query_start_loc.device
        if graph is None:
            return make_plan(shape, batch, device)
        return self.per_graph(graph, key, lambda: CapturedPlan(shape, graph, device)).write(batch)


class FlexBuilder(TorchBuilder):
    """Block masks are made anew at each step, elsewhere in memory: no graph could read them."""

    supports_graphs = False
