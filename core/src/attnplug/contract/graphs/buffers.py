"""The buffers of a captured graph: the tensors that its replays read, and what a plugin keeps beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from weakref import WeakSet, ref

import torch
from attrs import evolve

from attnplug.contract.graphs.invariants import changed_fields, snapshots
from attnplug.contract.graphs.masks import GraphMask
from attnplug.contract.graphs.persistent import addresses, as_captured, check_unmoved
from attnplug.contract.graphs.repeat import repeat_of
from attnplug.contract.graphs.shape import split_of_shape
from attnplug.contract.inputs.batch import with_fields
from attnplug.contract.inputs.exact import AS_GIVEN, exact_batch
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.errors import BatchError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.graphs.persistent import PersistentInputs
    from attnplug.contract.graphs.repeat import Repeat
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.exact import Lengths
    from attnplug.contract.inputs.limits import Limits
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.negotiation.agreement import Agreement

_T = TypeVar("_T")


class Built(Protocol):
    """What buffers read of `Metadata`."""

    @property
    def graph(self) -> GraphBuffers | None:
        """The buffers that it was built into."""


class Builder(Protocol):
    """What buffers read of `StepBuilder`."""

    @property
    def plan_groups(self) -> Mapping[Hashable, Sequence[Any]]:
        """The layers by plan key."""

    @property
    def agreement(self) -> Agreement:
        """What was negotiated."""

    def dummy_batch(self, key: GraphShape) -> Batch:
        """Return a batch of this shape for a capture."""


class Owner(Protocol):
    """What buffers read of `Captures`."""

    backend: Any
    limits: Limits
    device: torch.device

    @property
    def graphs(self) -> Mapping[GraphShape, GraphBuffers]:
        """The buffers of all captured graphs, by their shape."""

    def inputs(self, builder: Any) -> PersistentInputs:
        """Return the tensors that the graphs of a builder read."""

    def dummy_batch(self, key: GraphShape) -> Batch:
        """Return a batch of this shape for a capture."""


class GraphBuffers:
    """
    The buffers of one captured shape. `Captures.graph` makes them.

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

    def __init__(self, state: Owner, key: GraphShape, *, host_owned_inputs: bool) -> None:
        self.state = state
        self.key = key
        self.max_seq_len = key.max_seq_len or state.limits.max_seq_len
        self.host_owned_inputs = host_owned_inputs
        self._kept: dict[Hashable, Any] = {}
        self._latest: dict[Builder, ref[Built]] = {}  # of builders that `_kept` holds
        self._outdated: WeakSet[Built] = WeakSet()

    def __repr__(self) -> str:
        return f"GraphBuffers({self.key}, of {self.state.backend.id})"

    # --- what a plugin uses ---

    def share(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """
        Return `make()`, called once in the life of these buffers.

        All builders of the state share what is kept here; `MetadataBuilder.per_graph` keeps what one builder needs.
        """
        if key not in self._kept:
            with outside_inference_mode():
                self._kept[key] = make()
        return cast("_T", self._kept[key])

    # --- what a host calls ---

    def dummy_batch(self, builder: Builder | None = None) -> Batch:
        """
        Return a batch of this shape for the capture. It touches nothing but the null block.

        Args:
            builder: Whose agreement it is made for; None is that of the backend which made the state.
        """
        owner = self.state if builder is None else builder
        return owner.dummy_batch(evolve(self.key, max_seq_len=self.max_seq_len))

    def fits(self, batch: Batch) -> bool:
        """
        Whether a batch can be padded to this shape. Padded requests and rows do not count, unless the host owns the
        inputs; `max_seq_len` counts as it is.

        Raises:
            BatchError: The number of padded requests is invalid.
            TensorError: A tensor has not one entry for each request.
        """
        exact, lengths = exact_batch(batch, AS_GIVEN)
        return self.takes(batch if self.host_owned_inputs else exact, lengths)

    # --- machinery ---

    def takes(self, batch: Batch, lengths: Lengths) -> bool:
        """Whether a batch with the numbers that `take` sees fits this shape."""
        # Most shapes of a state are too small: that is compared first, and alone.
        return batch.num_reqs <= self.key.num_reqs and next(_misfits(self, batch, lengths), None) is None

    def is_captured(self, builder: Builder) -> bool:
        """Whether this builder has built into these buffers."""
        return ("captured", builder) in self._kept

    def take(self, batch: Batch, lengths: Lengths, split: BatchSplit, builder: Builder) -> BatchSplit:
        """
        Return a checked batch as the graph sees it, with the split of the graph's shape. `StepBuilder.build` calls
        it.

        Args:
            batch: The exact batch; the host's own, padding included, where it owns the inputs.
            lengths: The lengths of the exact batch.
            split: Its split.
            builder: Whose it is.

        Raises:
            BatchError: The batch does not fit the shape, or its tensors moved though the host owns them.
        """
        for given, expected in _misfits(self, batch, lengths):
            raise BatchError(
                f"a batch with {given} was given for the graph {self.key}",
                expected,
                "pass a batch that fits the graph (Captures.find_graph finds one), or build with graph=None",
            )
        self._outdate(builder)
        seen = self._as_seen(batch, builder)
        return split_of_shape(self.key, split, seen, builder.agreement.requirements)

    def repeated(self, batch: Batch, builder: Builder) -> BatchSplit | None:
        """
        Return what `take` would, where all checks of the builder's last batch hold for this one too; None where they
        are made again.
        """
        kept: Repeat | None = self._kept.get(("repeat", builder))
        if kept is None or not kept.takes(batch):
            return None
        self._outdate(builder)
        before = kept.split.batch  # its tensors on the device are those of this batch, and its numbers the graph's
        seen = with_fields(before, query_start_loc_cpu=batch.query_start_loc_cpu, seq_lens_cpu=batch.seq_lens_cpu)
        return split_of_shape(self.key, kept.split, seen, builder.agreement.requirements)

    def keep_repeat(self, batch: Batch, lengths: Lengths, split: BatchSplit, builder: Builder) -> None:
        """Keep what `repeated` compares: what `take` was given, and what it returned."""
        most = min(self.max_seq_len, self.state.limits.max_seq_len)
        self._kept["repeat", builder] = repeat_of(batch, lengths, split, most, builder.agreement.block_size or 1)

    def mark(self) -> frozenset[Hashable]:
        """Return the names of what is kept here now, for `roll_back`."""
        return frozenset(self._kept)

    def roll_back(self, mark: frozenset[Hashable]) -> None:
        """Release what was added since the mark was made: a builder whose capture failed has not captured."""
        self._kept = {name: value for name, value in self._kept.items() if name in mark}
        self._latest = {builder: seen for builder, seen in self._latest.items() if self.is_captured(builder)}

    def is_outdated(self, metadata: Built) -> bool:
        """
        Whether a later build has overwritten what metadata of these buffers reads, so that it is of no step any more.

        The metadata of the capture is never: a replay reads, through it, whatever was built last.
        """
        return metadata in self._outdated

    def _outdate(self, builder: Builder) -> None:
        """Mark the metadata whose tensors are written now. The state's tensors serve all shapes of a builder."""
        kept = self._latest.pop(builder, None) if self.host_owned_inputs else self.state.inputs(builder).latest
        latest = None if kept is None else kept()
        if latest is not None and latest.graph is not None:
            latest.graph.outdate(latest)

    def outdate(self, metadata: Built) -> None:
        """Mark metadata of these buffers as overwritten."""
        self._outdated.add(metadata)

    def _as_seen(self, batch: Batch, builder: Builder) -> Batch:
        if self.host_owned_inputs:
            check_unmoved(self.share(("addresses", builder), lambda: addresses(batch)), batch)
            seen = as_captured(batch, self.key, self.max_seq_len)
        else:
            seen = self.state.inputs(builder).write(batch, self.key, self.max_seq_len)
        if builder.agreement.requirements.mm_prefix:
            seen = with_fields(seen, mm_prefix_range=self._spans(batch, builder), mm_prefix_range_cpu=None)
        if batch.custom_mask is None:
            return seen
        kept: GraphMask = self.share(("mask", builder), lambda: self._make_mask(builder))
        running = batch.num_reqs - batch.num_padded_reqs
        mask = kept.write(batch.custom_mask, seen.query_start_loc, seen.seq_lens, running)
        return with_fields(seen, custom_mask=mask)

    def _spans(self, batch: Batch, builder: Builder) -> Tensor:
        """Write the spans of a step's tokens, and return them as the graph reads them: padding is in none."""
        rows, device = self.key.num_tokens, self.state.device
        kept = self.share(("spans", builder), lambda: torch.empty(rows, 2, dtype=torch.int32, device=device))
        kept.fill_(-1)
        if batch.mm_prefix_range is not None:
            used = min(batch.num_actual_tokens, rows)
            kept[:used].copy_(batch.mm_prefix_range[:used], non_blocking=True)
        return kept

    def _make_mask(self, builder: Builder) -> GraphMask:
        """Return the mask of this shape, in the memory of another shape where that is large enough."""
        others = (graph.mask_of(builder) for graph in self.state.graphs.values())
        return GraphMask(self.key, self.max_seq_len, [mask for mask in others if mask is not None], self.state.device)

    def mask_of(self, builder: Builder) -> GraphMask | None:
        """Return the mask that a builder has in these buffers, None where it has none."""
        return self._kept.get(("mask", builder))

    def seal(self, metadata: Built, builder: Builder, given: Batch) -> None:
        """
        Compare metadata with that of the capture. `StepBuilder.build` calls it.

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
            self._kept["metadata", builder] = ref(metadata)
        else:
            changed = changed_fields(captured, metadata)
            if changed:
                _refuse_changed(builder, changed)
            if self.host_owned_inputs:
                self._latest[builder] = ref(metadata)
            else:
                self.state.inputs(builder).latest = ref(metadata)
        self._kept["given", builder] = given

    def is_current(self, metadata: Built, builder: Builder) -> bool:
        """Whether metadata is that of the builder's capture, or of its last build, into these buffers."""
        latest = self._latest.get(builder) if self.host_owned_inputs else self.state.inputs(builder).latest
        return any(kept is not None and kept() is metadata for kept in (self._kept.get(("metadata", builder)), latest))

    def prepares_itself(self, builder: Builder) -> bool:
        """Whether the graph has recorded the builder's `prepare_in_graph`."""
        return ("prepared", builder) in self._kept

    def keep_prepared(self, builder: Builder) -> None:
        """Note that the graph records the builder's `prepare_in_graph`."""
        self._kept["prepared", builder] = True

    def given(self, builder: Builder) -> Batch:
        """Return the batch that this builder last built into these buffers, as the host gave it."""
        return cast("Batch", self._kept["given", builder])


def _misfits(graph: GraphBuffers, batch: Batch, lengths: Lengths) -> Iterator[tuple[str, str]]:
    """Yield what the batch has, and what the graph takes in its place."""
    key = graph.key
    for name, count, most in (
        ("num_reqs", batch.num_reqs, key.num_reqs),
        ("num_actual_tokens", batch.num_actual_tokens, key.num_tokens),
        ("max_seq_len", batch.max_seq_len, graph.max_seq_len),
    ):
        if count > most:
            yield f"{name}={count}", f"it takes up to {most}"
    if key.query_len is not None and not (lengths.query_len == key.query_len and lengths.is_packed):
        yield _query_misfit(key.query_len, lengths)
    if batch.common_prefix_len:
        yield f"common_prefix_len={batch.common_prefix_len}", "a shared prefix is a number, which a graph would freeze"
    if batch.custom_mask is not None and key.query_len is None:
        yield "a custom_mask", "a mask is in graphs of one query length only, which fixes its size"
    if batch.extra:
        yield f"extra {', '.join(map(repr, batch.extra))}", "values of open features are not in the graph"
    if batch.encoder_seq_lens is not None:
        yield from _encoder_misfits(graph, batch)
    if batch.key_start_loc is not None:
        yield "a key_start_loc", "graphs read K/V from a paged cache"
    if graph.host_owned_inputs:
        yield from _padding_misfits(key, batch)


def _padding_misfits(key: GraphShape, batch: Batch) -> Iterator[tuple[str, str]]:
    """Yield the same for the host's own tensors, which come with the shape's padding."""
    writes = batch.slot_mapping is not None and batch.encoder_seq_lens is None
    found, slots = (batch.num_reqs, _num_slots(batch)), key.num_tokens if writes else 0
    if found != (key.num_reqs, slots):
        yield f"num_reqs={found[0]} and {found[1]} slots", "the host pads its own tensors to the shape"


def _query_misfit(query_len: int, lengths: Lengths) -> tuple[str, str]:
    """Return the same for queries of other lengths, or in another order."""
    if lengths.query_len == query_len:
        expected = "padded requests come last: a graph computes the rows of each from its index"
        return "a padded request before others", expected
    lens = [] if lengths.query_lens is None else [length for length in lengths.query_lens.tolist() if length]
    found = min(lens, default=0), max(lens, default=0)
    return f"queries of {found} tokens at least and at most", f"every query has {query_len}"


def _encoder_misfits(graph: GraphBuffers, batch: Batch) -> Iterator[tuple[str, str]]:
    """Cross attention reads what the encoder wrote at the first step of a request, which is not in the graph."""
    host = batch.slot_mapping_cpu
    written = _num_slots(batch) if host is None else int((host >= 0).sum())
    if written:
        yield f"{written} encoder tokens to write", "the K/V of the encoder are written eagerly"
    longest = batch.max_encoder_seq_len or 0
    if longest > graph.max_seq_len:
        yield f"max_encoder_seq_len={longest}", f"it takes up to {graph.max_seq_len}"


def _num_slots(batch: Batch) -> int:
    return 0 if batch.slot_mapping is None else batch.slot_mapping.shape[0]


def _refuse_changed(builder: Builder, changed: Sequence[str]) -> None:
    """Raise for metadata whose fields differ from those of the capture; plans are named by their layers."""
    plans = {f"plans[{key!r}]": impls[0].layer.name for key, impls in builder.plan_groups.items()}
    raise PluginContractError(
        f"{builder.agreement.id} built metadata for a captured graph whose "
        f"{', '.join(_with_layer(path, plans) for path in changed)} changed since the capture",
        "a replay reads the tensors of the capture, and every Python value is frozen in it",
        "write into tensors that MetadataBuilder.per_graph keeps, and bound what may grow by the graph's shape",
    )


def _with_layer(path: str, plans: Mapping[str, str]) -> str:
    """Return the path of a plan by its layer: plan keys are long."""
    for prefix, layer in plans.items():
        if path.startswith(prefix):
            return f"plan of layer {layer!r}{path.removeprefix(prefix)}"
    return path
