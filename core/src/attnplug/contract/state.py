"""Owns the workspace and the graph buffers: one object per backend, variant and device."""

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from attrs import frozen

from attnplug.contract._final import keep_attributes
from attnplug.contract.graphs.buffers import GraphBuffers
from attnplug.contract.graphs.persistent import PersistentInputs
from attnplug.contract.graphs.shape import check_key, graph_level
from attnplug.contract.guards.batch import check_batches
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.contract.inputs.limits import Parallel
from attnplug.errors import LimitsError, NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from attnplug.contract.backend import Backend
    from attnplug.contract.builder import MetadataBuilder
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.limits import Limits
    from attnplug.contract.metadata import Metadata


@frozen(eq=False)
class Step:
    """
    One step, built.

    Attributes:
        graph: The buffers of the graph to replay; None runs eagerly.
        metadata: What each builder built.
    """

    graph: GraphBuffers | None
    metadata: Mapping[MetadataBuilder, Metadata]

    def __repr__(self) -> str:
        return f"Step(graph={self.graph}, built by {', '.join(map(repr, self.metadata))})"


class State:
    """
    Owns the workspace and the graph buffers that all builders of one backend share. Plugins subclass it for what else
    must outlive a step. Everything in it is used in the order of one stream: microbatches on separate streams have
    separate states. In graph buffers, padded requests have neither query nor keys: a kernel that needs a key per
    request pads to the null block in a separate tensor.

    Attributes:
        backend: The backend that it serves.
        limits: The most that batches will need.
        parallel: The ranks that share the model.
        device: Where its tensors are.
    """

    # Core sets these, and `attnplug.load` refuses a plugin that reuses one of the names: it would shadow core's value.
    backend: Backend
    limits: Limits
    device: torch.device
    parallel: Parallel
    _workspace: Tensor | None
    _graphs: dict[GraphShape, GraphBuffers]
    _inputs: WeakKeyDictionary[MetadataBuilder, PersistentInputs]
    _max_batch_size: int
    _is_capturing: bool

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.device = device
        self.parallel = Parallel() if parallel is None else parallel
        self._workspace = None
        self._graphs = {}
        self._inputs = WeakKeyDictionary()  # a builder that is garbage-collected frees its graphs' inputs
        self._max_batch_size = 0
        self._is_capturing = False
        keep_attributes(self)

    def __repr__(self) -> str:
        most = f"{self.limits.max_num_reqs} requests and {self.limits.max_num_tokens} tokens"
        return f"{type(self).__name__}(of {self.backend.id} on {self.device}, for {most}, {len(self._graphs)} graphs)"

    # --- what a plugin uses ---

    @property
    def workspace(self) -> Tensor:
        """``(workspace_bytes,)`` uint8, zero at first use, then shared by builders and forwards in stream order."""
        if self._workspace is None:
            size = self.backend.workspace_bytes(self.limits)
            with outside_inference_mode():
                self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._workspace

    # --- what a host calls ---

    def begin_forward(self, batches: Mapping[MetadataBuilder, Batch], *, key: GraphShape | None = None) -> Step:
        """
        Pick a graph, or none, and build the step.

        Args:
            batches: One step's batch of each builder.
            key: The graph to take, for hosts whose layers have several states, or whose ranks agree on a shape; None
                takes the smallest that fits.

        Raises:
            ContractError: A batch is refused; see `MetadataBuilder.build`.
            LimitsError: There is no graph for the key.
        """
        check_batches(batches)
        graph = self.graph(key) if key is not None else self.find_graph(batches) if self._graphs else None
        return Step(graph, {builder: builder.build(batch, graph=graph) for builder, batch in batches.items()})

    def find_graph(self, batches: Mapping[MetadataBuilder, Batch]) -> GraphBuffers | None:
        """
        Return the smallest graph that all these builders have captured and all their batches fit, or None.

        Args:
            batches: One step's batch of each builder.
        """
        found = [graph for graph in self._graphs.values() if _serves(graph, batches)]
        return min(found, key=lambda graph: (graph.key.num_tokens, graph.key.num_reqs, graph.max_seq_len), default=None)

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """
        Make graph buffers inside this context, and capture with them. They are kept afterwards, until `release_graphs`.

        If the body raises, the buffers that it made are released.

        Args:
            max_batch_size: Most requests of a captured batch.

        Raises:
            NotNegotiatedError: No graph level was agreed on.
            LimitsError: `max_batch_size` is beyond the limits, differs from that of buffers that are still held, or a
                capture is active.
        """
        self._check_capture(max_batch_size)
        before = set(self._graphs)
        self._max_batch_size, self._is_capturing = max_batch_size, True
        _ = self.workspace  # allocated ahead: memory that a capture allocates belongs to its graph
        try:
            yield
        except BaseException:
            self._graphs = {key: graph for key, graph in self._graphs.items() if key in before}
            if not self._graphs:
                self._inputs.clear()  # the next capture may be of larger batches
            raise
        finally:
            self._is_capturing = False

    def graph(self, key: GraphShape, *, host_owned_inputs: bool | None = None) -> GraphBuffers:
        """
        Return the buffers of a shape; inside `graph_capture` it is made if need be.

        Args:
            key: The shape.
            host_owned_inputs: Whether graphs read the host's own tensors, which then come padded and never move; None
                is as it was made, and False for a new one.

        Raises:
            LimitsError: There is none outside a capture, or the agreed level or the limits do not allow the shape.
        """
        found = self._graphs.get(key)
        if found is not None and host_owned_inputs in (None, found.host_owned_inputs):
            return found
        if found is not None or not self._is_capturing:
            raise LimitsError(
                f"graph buffers for {key} were requested"
                + (f" with host_owned_inputs={host_owned_inputs}" if found else ""),
                "they were made with the other value" if found else "graph buffers are made inside State.graph_capture",
                "enter state.graph_capture(max_batch_size) first, and request each shape with one value",
            )
        check_key(key, self.backend.agreement, self.limits, self._max_batch_size)
        self._graphs[key] = GraphBuffers(self, key, host_owned_inputs=bool(host_owned_inputs))
        return self._graphs[key]

    @property
    def graphs(self) -> Mapping[GraphShape, GraphBuffers]:
        """The buffers of all captured graphs, by their shape."""
        return MappingProxyType(self._graphs)

    def release_graphs(self) -> None:
        """Release all graph buffers and what they hold. The graphs that were captured with them cannot be replayed."""
        self._graphs.clear()
        self._inputs.clear()

    # --- machinery ---

    def inputs(self, builder: MetadataBuilder) -> PersistentInputs:
        """Return the tensors that the graphs of a builder read."""
        if builder not in self._inputs:  # agreements that share a state may differ in their block size
            with outside_inference_mode():
                made = PersistentInputs(builder.agreement, self.limits, self._max_batch_size, self.device)
            self._inputs[builder] = made
        return self._inputs[builder]

    def _check_capture(self, max_batch_size: int) -> None:
        level = graph_level(self.backend.agreement, self.limits)
        if level == "never":
            raise NotNegotiatedError(
                "a graph capture was begun",
                f"{self.backend.id} runs without CUDA graphs in this agreement",
                "select again with the cudagraph level that you need",
            )
        if type(max_batch_size) is not int or not 1 <= max_batch_size <= self.limits.max_num_reqs:
            self._refuse(max_batch_size, f"the state was made for max_num_reqs={self.limits.max_num_reqs}")
        if self._is_capturing:
            self._refuse(max_batch_size, "another capture of this state is active")
        if self._graphs and max_batch_size != self._max_batch_size:
            self._refuse(max_batch_size, f"its graph buffers were made for {self._max_batch_size}, and are still held")

    def _refuse(self, max_batch_size: int, expected: str) -> None:
        raise LimitsError(
            f"graph_capture({max_batch_size!r}) was entered",
            expected,
            "capture all shapes at once, largest batch named; release_graphs() frees those there are",
        )


def _serves(graph: GraphBuffers, batches: Mapping[MetadataBuilder, Batch]) -> bool:
    return all(
        graph.is_captured(builder) and graph.fits(batch) and builder.can_run_in_cudagraph(batch)
        for builder, batch in batches.items()
    )
