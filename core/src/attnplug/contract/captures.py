"""The state that the builders of one backend share, as a host has it: graph buffers, and the steps built into them."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary

from attrs import frozen

from attnplug.contract.calls.check import InProcess
from attnplug.contract.graphs.buffers import GraphBuffers
from attnplug.contract.graphs.persistent import PersistentInputs
from attnplug.contract.graphs.shape import allows_graphs, check_key
from attnplug.contract.guards.batch import check_batches
from attnplug.contract.inputs.batch import with_fields
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.errors import LimitsError, NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    import torch
    from torch import Tensor

    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.exact import Lengths
    from attnplug.contract.inputs.limits import Limits, Parallel
    from attnplug.contract.loaded import LoadedBackend
    from attnplug.contract.step_builder import StepBuilder
    from attnplug.contract.vendor import Metadata, State
    from attnplug.negotiation.agreement import Agreement


@frozen(eq=False)
class Step:
    """
    One step, built.

    Attributes:
        graph: The buffers of the graph to replay; None runs eagerly.
        metadata: What each builder built.
    """

    graph: GraphBuffers | None
    metadata: Mapping[StepBuilder, Metadata]

    def __repr__(self) -> str:
        return f"Step(graph={self.graph}, built by {', '.join(map(repr, self.metadata))})"


@frozen(eq=False)
class Capture:
    """
    An active capture.

    Attributes:
        max_batch_size: Most requests of its batches.
        marks: What the buffers from before it held when it began.
        builders: Those that had inputs in graphs when it began.
    """

    max_batch_size: int
    marks: Mapping[GraphBuffers, frozenset[Hashable]]
    builders: frozenset[StepBuilder]


class Captures(InProcess):
    """
    The graph buffers of the builders that share a state, made by `LoadedBackend.make_state`.

    Everything in it is used in the order of one stream: microbatches on separate streams have separate states. Several
    agreements of one backend and variant may share it: windowed and full layers of one cache group, say.

    Attributes:
        wrapped: The vendor's state: the workspace, and what else outlives a step.
        backend: The backend that made it.
        limits: The most that batches will need.
        parallel: The ranks that share the model.
        device: Where its tensors are.
    """

    def __init__(self, state: State, backend: LoadedBackend, limits: Limits, parallel: Parallel) -> None:
        self.wrapped = state
        self.backend = backend
        self.limits = limits
        self.parallel = parallel
        self.device: torch.device = backend.device
        self._agreements: tuple[Agreement, ...] = (backend.agreement,)
        self._graphs: dict[GraphShape, GraphBuffers] = {}
        # Weak: a builder that is garbage-collected frees its graphs' inputs.
        self._inputs: WeakKeyDictionary[StepBuilder, PersistentInputs] = WeakKeyDictionary()
        self._most_reqs = 0
        self._capture: Capture | None = None
        self._lock = Lock()

    def __repr__(self) -> str:
        most = f"{self.limits.max_num_reqs} requests and {self.limits.max_num_tokens} tokens"
        name = type(self.wrapped).__name__
        return f"{name}(of {self.backend.id} on {self.device}, for {most}, {len(self._graphs)} graphs)"

    # --- what a host calls ---

    @property
    def workspace(self) -> Tensor:
        """``(workspace_bytes,)`` uint8: the vendor's `State.workspace`."""
        return self.wrapped.workspace

    def begin_forward(self, batches: Mapping[StepBuilder, Batch], *, key: GraphShape | None = None) -> Step:
        """
        Pick a graph, or none, and build the step.

        Args:
            batches: One step's batch of each builder.
            key: The graph to take, for hosts whose layers have several states, or whose ranks agree on a shape; None
                takes the smallest that fits.

        Raises:
            ContractError: A batch is refused; see `StepBuilder.build`.
            LimitsError: There is no graph for the key.
        """
        check_batches(batches)
        graph = self.graph(key) if key is not None else self.find_graph(batches) if self._graphs else None
        return Step(graph, {builder: builder.build(batch, graph=graph) for builder, batch in batches.items()})

    def find_graph(self, batches: Mapping[StepBuilder, Batch]) -> GraphBuffers | None:
        """
        Return the smallest graph that all these builders have captured and all their batches fit, or None.

        Bounds and padded requests count for nothing: it is the graph of the batch without them. Where the host owns a
        graph's inputs, the batch has to have the graph's shape as it is.

        Args:
            batches: One step's batch of each builder.

        Raises:
            ContractError: The number of padded requests is invalid, or a bound does not hold.
        """
        if not self._graphs:
            return None
        if True in [graph.host_owned_inputs for graph in self._graphs.values()]:
            # The host may write its tensors again under one batch: nothing is kept with it.
            batches = {builder: with_fields(batch) for builder, batch in batches.items()}
        seen = {builder: builder.exact(batch) for builder, batch in batches.items()}
        # Batches that contradict themselves fit nowhere: `build` refuses them.
        if not all(lengths.query_lens is not None and b.covers(exact, lengths) for b, (exact, lengths) in seen.items()):
            return None
        found = [graph for graph in self._graphs.values() if _serves(graph, batches, seen)]
        return min(found, key=lambda graph: (graph.key.num_tokens, graph.key.num_reqs, graph.max_seq_len), default=None)

    def begin_capture(self, max_batch_size: int) -> None:
        """
        Open a capture: until `end_capture` or `abort_capture`, `graph` makes buffers.

        Buffers that are held stay as they are, so that a host may capture more shapes later, one at a time. Captures do
        not nest. Of several threads that begin at once, one succeeds.

        Args:
            max_batch_size: Most requests of a batch captured from here on. While buffers are held, at most what the
                first of their captures named.

        Raises:
            NotNegotiatedError: No graph level was agreed on.
            LimitsError: `max_batch_size` is beyond the limits, or beyond what buffers that are still held were made
                for, or a capture is active.
        """
        if not allows_graphs(self._agreements, self.limits):
            raise NotNegotiatedError(
                "a graph capture was begun",
                f"{self.backend.id} runs without CUDA graphs in this agreement",
                "select again with the cudagraph level that you need",
            )
        if type(max_batch_size) is not int or not 1 <= max_batch_size <= self.limits.max_num_reqs:
            _refuse(max_batch_size, f"the state was made for max_num_reqs={self.limits.max_num_reqs}")
        with self._lock:
            if self._capture is not None:
                _refuse(max_batch_size, "another capture of this state is active")
            if self._graphs and max_batch_size > self._most_reqs:
                _refuse(max_batch_size, f"its graph buffers were made for {self._most_reqs}, and are still held")
            _ = self.wrapped.workspace  # allocated ahead: memory that a capture allocates belongs to its graph
            if not self._graphs:
                self._inputs.clear()  # made for batches of another size
                self._most_reqs = max_batch_size
            marks = {graph: graph.mark() for graph in self._graphs.values()}
            self._capture = Capture(max_batch_size, marks, frozenset(self._inputs))

    def end_capture(self) -> None:
        """Close the capture and keep its buffers, until `release_graphs`. Without an active capture, do nothing."""
        self._capture = None

    def abort_capture(self) -> None:
        """
        Close the capture and release what it made: its buffers, and what it added to buffers from before.

        Graphs that were captured with them cannot be replayed. Buffers from before the capture stay as they were.
        Without an active capture, do nothing: a host calls it wherever a capture may have failed.
        """
        with self._lock:
            capture, self._capture = self._capture, None
            if capture is None:
                return
            self._graphs = {key: graph for key, graph in self._graphs.items() if graph in capture.marks}
            for graph, mark in capture.marks.items():
                graph.roll_back(mark)
            for builder in set(self._inputs) - (capture.builders if self._graphs else set()):
                del self._inputs[builder]

    @contextmanager
    def graph_capture(self, max_batch_size: int) -> Iterator[None]:
        """
        Make graph buffers inside this context: `begin_capture`, then `end_capture`, or `abort_capture` if the body
        raises.

        Args:
            max_batch_size: As for `begin_capture`, which may raise too.
        """
        self.begin_capture(max_batch_size)
        try:
            yield
        except BaseException:
            self.abort_capture()
            raise
        self.end_capture()

    def graph(self, key: GraphShape, *, host_owned_inputs: bool | None = None) -> GraphBuffers:
        """
        Return the buffers of a shape; while a capture is active they are made if need be.

        Args:
            key: The shape.
            host_owned_inputs: Whether graphs read the host's own tensors, which then come padded and never move; None
                is as it was made, and False for a new one.

        Raises:
            LimitsError: There is none outside a capture, or the agreed level or the limits do not allow the shape.
        """
        found = self._graphs.get(key) or self._make_graph(key, host_owned_inputs=bool(host_owned_inputs))
        if found is not None and host_owned_inputs in (None, found.host_owned_inputs):
            return found
        raise LimitsError(
            f"graph buffers for {key} were requested"
            + (f" with host_owned_inputs={host_owned_inputs}" if found else ""),
            "they were made with the other value" if found else "graph buffers are made while a capture is active",
            "call state.begin_capture(max_batch_size) first, and request each shape with one value",
        )

    @property
    def graphs(self) -> Mapping[GraphShape, GraphBuffers]:
        """The buffers of all captured graphs, by their shape."""
        return MappingProxyType(self._graphs)

    def release_graphs(self) -> None:
        """Release all graph buffers and what they hold. The graphs that were captured with them cannot be replayed."""
        self._graphs.clear()
        self._inputs.clear()

    # --- machinery ---

    def dummy_batch(self, key: GraphShape) -> Batch:
        """Return a batch of this shape for a capture, of the agreement that the state was made for."""
        return self.backend.dummy_batch(key)

    def inputs(self, builder: StepBuilder) -> PersistentInputs:
        """Return the tensors that the graphs of a builder read."""
        found = self._inputs.get(builder)
        if found is None:  # agreements that share a state may differ in their block size
            with outside_inference_mode():
                found = PersistentInputs(builder.agreement, self.limits, self._most_reqs, self.device)
            self._inputs[builder] = found
        return found

    def holds(self, graph: GraphBuffers) -> bool:
        """Whether buffers are those of their shape, and were not released."""
        return self._graphs.get(graph.key) is graph

    def reserve_workspace(self, backend: LoadedBackend) -> None:
        """
        Make the workspace as large as a further agreement needs it. `LoadedBackend.make_builder` calls it.

        Raises:
            LimitsError: Graphs hold the workspace, and it is too small.
        """
        needed, given = backend.workspace_bytes(self.limits), self.wrapped.workspace_bytes
        if not self.wrapped.lacks(backend.wrapped):
            return
        with self._lock:
            if self._graphs or self._capture is not None:
                raise LimitsError(
                    f"a builder of {backend.id} was given a state of a workspace of {given} bytes, which graphs hold",
                    f"this agreement needs {needed}",
                    "make all builders of a state before its first capture, or release_graphs() first",
                )
            self.wrapped.enlarge(backend.wrapped)

    def join(self, agreement: Agreement) -> None:
        """Let the builders of another agreement share this state. `LoadedBackend.make_builder` calls it."""
        with self._lock:
            if agreement not in self._agreements:
                self._agreements = (*self._agreements, agreement)

    def _make_graph(self, key: GraphShape, *, host_owned_inputs: bool) -> GraphBuffers | None:
        """Make the buffers of a shape, once; return None outside a capture."""
        with self._lock:
            if self._capture is None:
                return None
            if key not in self._graphs:
                check_key(key, self._agreements, self.limits, self._capture.max_batch_size)
                self._graphs[key] = GraphBuffers(self, key, host_owned_inputs=host_owned_inputs)
            return self._graphs[key]


def _serves(
    graph: GraphBuffers,
    batches: Mapping[StepBuilder, Batch],
    seen: Mapping[StepBuilder, tuple[Batch, Lengths]],
) -> bool:
    """Whether a graph takes the batches: as the host gave them where it owns the inputs, else made exact."""
    for builder, (exact, lengths) in seen.items():
        batch = builder.given_to_graphs(batches[builder]) if graph.host_owned_inputs else exact
        if not (graph.is_captured(builder) and graph.takes(batch, lengths)):
            return False
    return True


def _refuse(max_batch_size: int, expected: str) -> NoReturn:
    raise LimitsError(
        f"a capture with max_batch_size={max_batch_size!r} was begun",
        expected,
        "name the largest batch in the first capture, and end each one; release_graphs() frees those there are",
    )
