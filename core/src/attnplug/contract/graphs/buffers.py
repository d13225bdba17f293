"""What must outlive a captured graph: the tensors that its replays read, and what a plugin keeps beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from attrs import evolve

from attnplug.contract.graphs.invariants import check_frozen, snapshots
from attnplug.contract.graphs.persistent import addresses, as_captured, check_unmoved
from attnplug.contract.graphs.shape import check_fits, fits, split_of_shape
from attnplug.contract.inputs.kv_cache import outside_inference_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from attnplug.contract.builder import MetadataBuilder
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.metadata import Metadata
    from attnplug.contract.state import State

_T = TypeVar("_T")


class GraphBuffers:
    """
    The buffers of one captured shape. `State.graph` makes them.

    A host captures with the metadata of ``builder.build(graph.dummy_batch(builder), graph=graph)``. Before each replay
    it calls ``builder.build(batch, graph=graph)``: every tensor of the metadata keeps the address of the capture, and
    holds the step's values.

    Attributes:
        state: Who owns it.
        key: The shape.
        max_seq_len: The longest sequence of a replay.
        host_owned_inputs: Whether the host's own tensors are read: they come padded to the shape, and never move.
            Otherwise batches are copied into the state's tensors.
    """

    def __init__(self, state: State, key: GraphShape, *, host_owned_inputs: bool) -> None:
        self.state = state
        self.key = key
        self.max_seq_len = key.max_seq_len or state.limits.max_seq_len
        self.host_owned_inputs = host_owned_inputs
        self._kept: dict[Hashable, Any] = {}

    def __repr__(self) -> str:
        return f"GraphBuffers({self.key}, of {self.state.backend.id})"

    def share(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """
        Return `make()`, called once in the life of this slot.

        All builders of the state share what is kept here; `MetadataBuilder.per_graph` keeps what one builder needs.
        """
        if key not in self._kept:
            with outside_inference_mode():
                self._kept[key] = make()
        return cast("_T", self._kept[key])

    def dummy_batch(self, builder: MetadataBuilder | None = None) -> Batch:
        """
        Return a batch of this shape for the capture. It touches nothing but the null block.

        Args:
            builder: Whose agreement it is made for; None is that of the backend which made the state.
        """
        backend = self.state.backend if builder is None else builder.backend
        return backend.dummy_batch(evolve(self.key, max_seq_len=self.max_seq_len))

    def fits(self, batch: Batch) -> bool:
        """Whether a batch can be padded to this shape."""
        return fits(self, batch)

    def is_captured(self, builder: MetadataBuilder) -> bool:
        """Whether this builder has built into the slot."""
        return ("captured", builder) in self._kept

    def take(self, split: BatchSplit, builder: MetadataBuilder) -> BatchSplit:
        """
        Return a checked batch as the graph sees it, with the split of the graph's shape. `MetadataBuilder.build` calls
        it.

        Raises:
            BatchError: The batch does not fit the shape, or its tensors moved though the host owns them.
        """
        check_fits(self, split.batch)
        return split_of_shape(self.key, split, self._as_seen(split.batch, builder), builder.agreement.requirements)

    def _as_seen(self, batch: Batch, builder: MetadataBuilder) -> Batch:
        if not self.host_owned_inputs:
            return self.state.inputs(builder).write(batch, self.key, self.max_seq_len)
        check_unmoved(self.share(("addresses", builder), lambda: addresses(batch)), batch)
        return as_captured(batch, self.key, self.max_seq_len)

    def seal(self, metadata: Metadata, builder: MetadataBuilder, given: Batch) -> Metadata:
        """
        Compare metadata with that of the capture, and return it. `MetadataBuilder.build` calls it.

        Args:
            metadata: What the plugin built.
            builder: Whose it is.
            given: The batch as the host gave it.

        Raises:
            PluginContractError: A tensor moved, or a Python value changed, that a graph has frozen.
        """
        captured = self._kept.get(("captured", builder))
        if captured is None:
            self._kept["captured", builder] = snapshots(metadata)
        else:
            check_frozen(captured, metadata, builder)
        self._kept["given", builder] = given
        return metadata

    def given(self, builder: MetadataBuilder) -> Batch:
        """Return the batch that this builder last built into the slot, as the host gave it."""
        return cast("Batch", self._kept["given", builder])
