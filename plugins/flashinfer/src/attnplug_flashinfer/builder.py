"""Plans each step with the library."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attnplug.contract import MetadataBuilder, upload
from attnplug_flashinfer.arrays import Buffers, rows_of_dense, rows_of_graph, rows_of_step
from attnplug_flashinfer.plan import Plan, Planner
from attnplug_flashinfer.routes import routes_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract import AttentionImpl, Backend, Batch, BatchSplit, GraphBuffers, State


class FlashInferBuilder(MetadataBuilder):
    """
    Makes one `Plan` per plan key. The arrays of the plans are made once per batch and shared by all keys.

    The library's decodes have one row per request. Requests of one row at the front are decodes to it, and all others
    are prefills, whatever phase they belong to.
    """

    supports_graphs = True

    def __init__(self, backend: Backend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        self._is_paged = bool(self.agreement.requirements.paged)
        self._routes = routes_of(self.agreement)
        self._block_size = self.agreement.block_size or 1
        self._planners = {key: Planner(group[0], state) for key, group in self.plan_groups.items()}
        self._indices: weakref.ref[Tensor] | None = None

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return a plan for each plan key. The plans of a graph are written into its buffers."""
        del split, fast
        return {"plans": self._plans(batch) if graph is None else self._graph_plans(batch, graph)}

    def _plans(self, batch: Batch) -> Mapping[Hashable, Plan]:
        step = rows_of_step(batch, self._block_size, self._routes) if self._is_paged else rows_of_dense(batch)
        return {key: planner.plan(step) for key, planner in self._planners.items()}

    def _graph_plans(self, batch: Batch, graph: GraphBuffers) -> Mapping[Hashable, Plan]:
        buffers, starts = self.per_graph(graph, "buffers", lambda: self._buffers(graph))
        kind = next(route.kind for route in self._routes if route.accepts(batch.max_query_len))
        rows = rows_of_graph(batch, self._block_size, kind, starts)
        plans = {}
        for key, planner in self._planners.items():
            plans[key] = self.per_graph(graph, key, partial(planner.for_graph, rows, buffers)).update(rows)
        return plans

    def _buffers(self, graph: GraphBuffers) -> tuple[Buffers, Tensor]:
        """Return the buffers of a graph, which all plan keys share, and the first row of each of its requests."""
        reqs, device = graph.key.num_reqs, self.state.device
        query_len = graph.key.num_tokens // reqs
        starts = torch.arange(0, graph.key.num_tokens + 1, query_len, dtype=torch.int32)
        counts = torch.zeros(2 * reqs + 1, dtype=torch.int32, device=device)
        indices = self._indices_of(reqs * -(-graph.max_seq_len // self._block_size))
        return Buffers(upload(starts, device), counts, indices), starts

    def _indices_of(self, size: int) -> Tensor:
        """Return memory for `size` pages. Graphs share it, since each build writes it before its replay."""
        indices = None if self._indices is None else self._indices()
        if indices is None or indices.shape[0] < size:
            indices = torch.zeros(size, dtype=torch.int32, device=self.state.device)
            self._indices = weakref.ref(indices)  # the graphs own it: releasing them frees it
        return indices
