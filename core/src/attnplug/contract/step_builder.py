"""Turns a batch into metadata: checks it, has the vendor's builder plan, and assembles what the forwards read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from attnplug.contract.calls.advance import DecodeInputs, next_decode_batch
from attnplug.contract.calls.check import InProcess
from attnplug.contract.graphs.buffers import GraphBuffers
from attnplug.contract.graphs.capture import is_capturing
from attnplug.contract.graphs.shape import runs_at
from attnplug.contract.guards.batch import BatchGuard, refuse_batch
from attnplug.contract.guards.negotiated import requests_plain
from attnplug.contract.inputs.batch import Batch, with_fields
from attnplug.contract.inputs.exact import exact_batch, with_lengths
from attnplug.contract.metadata import assemble
from attnplug.contract.vendor import MetadataBuilder
from attnplug.errors import BatchError, NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.attention import Attention
    from attnplug.contract.captures import Captures
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.exact import Lengths
    from attnplug.contract.inputs.limits import Limits, Parallel
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.loaded import LoadedBackend
    from attnplug.contract.vendor import AttentionImpl, Metadata
    from attnplug.negotiation.agreement import Agreement


class StepBuilder(InProcess):
    """
    Builds metadata for the layers that share a block table and an agreement. `LoadedBackend.make_builder` makes it.

    `build` runs while the previous step may still be executing, and no more than that one. One builder serves one
    thread, and one microbatch.

    Attributes:
        wrapped: The vendor's builder.
        backend: The backend that made it.
        agreement: What was negotiated.
        impls: The layers that it serves.
        state: Workspace and graph buffers.
        limits: The state's: the most that batches need.
        parallel: The state's: the ranks that share the model.
        requires_uniform_decodes: Whether all decodes of a batch have one query length, as the vendor's builder says.
        decodes_first: Whether an engine should move decodes to the front of a batch; see `MetadataBuilder`.
        graph_level: The highest kind of batch that can be replayed from a graph.
    """

    def __init__(
        self, builder: MetadataBuilder, backend: LoadedBackend, impls: Sequence[Attention], state: Captures
    ) -> None:
        self.wrapped = builder
        self.backend = backend
        self.agreement: Agreement = backend.agreement
        self.impls = tuple(impls)
        self.state = state
        self.limits: Limits = state.limits
        self.parallel: Parallel = state.parallel
        self.requires_uniform_decodes: bool = builder.requires_uniform_decodes
        self.decodes_first: bool = builder.decodes_first
        self.graph_level: str = builder.graph_level
        self._guard = BatchGuard(
            self.agreement, self.limits, state.device, requires_uniform_decodes=self.requires_uniform_decodes
        )
        # What else a batch is checked for: other tensors, lengths on the device, and whatever the plugin looks at.
        self._repeats = (
            requests_plain(self.agreement.requirements)
            and not self._guard.terms.read
            and type(builder).can_capture is MetadataBuilder.can_capture
        )

    def __repr__(self) -> str:
        return repr(self.wrapped)

    # --- what a host calls ---

    @property
    def plan_groups(self) -> Mapping[Hashable, Sequence[AttentionImpl]]:
        """The vendor's implementations by plan key."""
        return self.wrapped.plan_groups

    @property
    def graph_lengths(self) -> tuple[int, ...]:
        """The longest sequences for which an engine should capture graphs; see `MetadataBuilder.graph_lengths`."""
        return self.wrapped.graph_lengths

    @property
    def replays_without_build(self) -> bool:
        """Whether a graph that records `prepare` may be replayed again without a `build`."""
        return self.wrapped.replays_without_build

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Sequence[int]) -> bool:
        """
        Whether attending to a shared prefix once is expected to be faster than attending to it in every request.

        Args:
            common_prefix_len: Tokens that all requests share, in the same blocks.
            query_lens: New tokens of each request.
        """
        return self.wrapped.use_cascade_attention(common_prefix_len, query_lens)

    def build(self, batch: Batch, *, fast: bool = False, graph: GraphBuffers | None = None) -> Metadata:
        """
        Check the batch against the agreement and the limits, then plan.

        With a graph the batch is padded to its shape and copied into its buffers, whose addresses never change.
        Capture with ``build(graph.dummy_batch(self), graph=graph)``, replay with ``build(batch, graph=graph)``.

        Args:
            batch: This step's requests.
            fast: A hint: favor the speed of this build over the speed of the forwards.
            graph: The graph buffers of `Captures` that are written; None runs eagerly.

        Raises:
            BatchError: Numbers of the batch contradict each other, the agreement, the limits or the graph's shape.
            NotNegotiatedError: The batch, or the graph, uses what was not requested at selection.
            TensorError: A tensor of the batch has the wrong shape, dtype or device.
            CacheError: A slot or a block is outside the cache, given twice, or the null block.
            PluginContractError: The plugin's metadata for a graph differs from that of the capture.
        """
        if not isinstance(batch, Batch):
            refuse_batch(batch, "build")
        if graph is None:
            split = self._guard.check(batch)
            return assemble(self.wrapped, split, self.wrapped.plan_batch(split.batch, split, fast=fast, graph=None))
        _check_graph(self, graph)
        repeated = graph.repeated(batch, self) if graph.host_owned_inputs else None
        split, given = self._take(batch, graph) if repeated is None else (repeated, batch)
        fields = self.wrapped.plan_batch(split.batch, split, fast=fast, graph=graph)
        metadata = assemble(self.wrapped, split, fields, graph)
        graph.seal(metadata, self, given)
        if not graph.prepares_itself(self):
            self.wrapped.prepare_in_graph(metadata)
        return metadata

    def prepare(self, metadata: Metadata) -> bool:
        """
        Prepare a replay on the device, from inside the graph. Optional, and right in every place.

        A host calls it before the first layer, inside the capture, once for each builder. From then on each replay
        prepares itself, from what the input tensors hold at that time, and `build` leaves that work out. A graph that
        is captured again has to record it again. Outside a capture it repeats what `build` did; for eager metadata
        there is nothing to do.

        Args:
            metadata: What this builder's last build for the graph returned.

        Returns:
            Whether a graph records it.

        Raises:
            BatchError: The metadata is of another builder, of an earlier step, or of a graph that was released.
        """
        _check_own(self, metadata)
        graph = metadata.graph
        if graph is None:
            return False
        _check_graph(self, graph)
        if not graph.is_current(metadata, self):
            raise BatchError(
                f"metadata of {graph} was given to prepare",
                "its graph reads the tensors of another builder, or a later build has overwritten them",
                "pass what the last build of this builder returned, or that of the capture",
            )
        is_recorded = is_capturing(self.state.device)
        if is_recorded:
            graph.keep_prepared(self)
        self.wrapped.prepare_in_graph(metadata)
        return is_recorded

    def can_run_in_cudagraph(self, batch: Batch) -> bool:
        """
        Whether a batch like this one can be replayed from a graph; one of its shape has to be captured besides.

        Lengths that the agreement reads from the device are read here, once, and `build` reads them no more.
        """
        return self.covers(*self.exact(batch))

    def update_block_table(
        self,
        metadata: Metadata,
        block_table: Tensor,
        slot_mapping: Tensor | None,
        *,
        block_table_cpu: Tensor | None = None,
        slot_mapping_cpu: Tensor | None = None,
    ) -> Metadata:
        """
        Return metadata of the same requests with another cache group's pages. The original is left alone.

        Args:
            metadata: Eager metadata of a builder with the same agreement.
            block_table: ``(num_reqs, max_blocks)`` int32.
            slot_mapping: ``(tokens,)`` int64; None as in `Batch`.
            block_table_cpu: CPU copy, optional on a device.
            slot_mapping_cpu: CPU copy, optional on a device.

        Raises:
            BatchError: The metadata is of another agreement or made for a graph, or the table is too short.
            TensorError: A tensor has the wrong shape, dtype or device.
            CacheError: A slot or a block is outside the cache, given twice, or the null block.
        """
        _check_own(self, metadata)
        if metadata.graph is not None:
            raise BatchError(
                f"metadata of {metadata.graph} was given to update_block_table",
                "a graph reads its own buffers, and each builder has separate ones",
                "build(batch, graph=graph) with the other group's block table",
            )
        before, lengths = self.exact(metadata.batch, is_read=True)
        given = {"block_table": (block_table, block_table_cpu), "slot_mapping": (slot_mapping, slot_mapping_cpu)}
        fields: dict[str, Any] = {}
        for name, (tensor, cpu) in given.items():
            copy = tensor if cpu is None and tensor is not None and tensor.is_cpu else cpu
            fields[name] = lengths.cut_alike(before, name, tensor)
            fields[f"{name}_cpu"] = fields[name] if copy is tensor else lengths.cut_alike(before, name, copy)
        batch = with_fields(before, **fields)
        batch.derived[self._guard.terms] = None, lengths  # of the same requests
        split = self._guard.check(batch)
        return assemble(self.wrapped, split, self.wrapped.replan_block_table(metadata, split.batch, split))

    def advance_step(
        self,
        metadata: Metadata,
        *,
        tokens: DecodeInputs | None = None,
        num_queries: int | None = None,
        prefills_to_decodes: bool = False,
    ) -> Metadata:
        """
        Return the metadata of the next step, in which each request decodes the token that was sampled for it.

        All is computed on the device, and the CPU copies advance by one too, so that nothing waits for the sampler.
        Eager metadata is left alone; with a graph, its buffers are written.

        Args:
            metadata: What this builder returned for the step before.
            tokens: The model's inputs, which are advanced in place; None leaves them to the host.
            num_queries: Requests that go on: the first ones. The others are padding from now on. None is all that have
                a query.
            prefills_to_decodes: Whether requests with several query tokens turn into decodes; False refuses them.

        Raises:
            BatchError: There are prefills, there is no room for another token, or the tokens do not fit.
            NotNegotiatedError: The batch has a custom mask, extras, or a cache that is spread over ranks.
        """
        _check_own(self, metadata)
        graph = metadata.graph
        if graph is not None and graph.host_owned_inputs:
            raise BatchError(
                f"advance_step was called for {graph}",
                "its graph reads the host's own tensors, which nobody else writes",
                "advance those, and build(batch, graph=graph)",
            )
        if graph is not None and graph.is_outdated(metadata):
            raise BatchError(
                f"metadata of {graph} from an earlier step was given to advance_step",
                "a later build has overwritten the tensors of the graph that it reads",
                "pass what the last build returned",
            )
        before, lengths = self.exact(metadata.batch if graph is None else graph.given(self), is_read=True)
        batch = next_decode_batch(before, lengths, self.agreement, num_queries, prefills_to_decodes=prefills_to_decodes)
        self.exact(batch, is_read=True)
        count = batch.num_actual_tokens
        if tokens is not None:
            tokens.check(count)
        if graph is not None:
            advanced = self.build(batch, fast=True, graph=graph)
        else:
            split = self._guard.check(batch)
            advanced = assemble(self.wrapped, split, self.wrapped.plan_next_step(metadata, split.batch, split))
        if tokens is not None:  # last: a refusal leaves the model's inputs as they were
            tokens.advance(before.seq_lens[:count])
        return advanced

    # --- machinery ---

    def _take(self, batch: Batch, graph: GraphBuffers) -> tuple[BatchSplit, Batch]:
        """Return the split of a batch as the graph sees it, and the batch that it was made of."""
        # Before anything is written: a refused batch leaves the buffers as they were.
        in_place = graph.host_owned_inputs
        if in_place:
            batch = with_fields(batch)  # the host may write its tensors again under one batch: nothing is kept with it
        split = self._guard.check(batch, in_place=in_place)
        exact, lengths = exact_batch(split.batch, self._guard.terms)
        if not self.covers(exact, lengths):
            _refuse_uncovered(self, graph, exact.max_query_len)
        given = self.given_to_graphs(batch) if in_place else exact
        split = graph.take(given, lengths, split, self)
        if in_place and self._repeats:
            graph.keep_repeat(given, lengths, split, self)
        return split, given

    def has_captured(self) -> bool:
        """Whether a graph that is held reads what this builder built."""
        return any(graph.is_captured(self) for graph in self.state.graphs.values())

    def dummy_batch(self, key: GraphShape) -> Batch:
        """Return a batch of this shape for a capture, of this builder's agreement."""
        return self.backend.dummy_batch(key)

    def exact(self, batch: Batch, *, is_read: bool = False) -> tuple[Batch, Lengths]:
        """Return a batch as plugins see it, and its lengths; see `exact_batch`."""
        return exact_batch(batch, self._guard.terms, is_read=is_read)

    def covers(self, batch: Batch, lengths: Lengths) -> bool:
        """Whether an exact batch can be replayed from a graph; see `runs_at`."""
        longest = self.agreement.requirements.decode_query_len
        return (
            not batch.common_prefix_len
            and runs_at(self.graph_level, lengths.query_len, longest)
            and self.wrapped.can_capture(batch)
        )

    def given_to_graphs(self, batch: Batch) -> Batch:
        """Return a batch as a graph of the host's own inputs sees it: padded, with the lengths that were read."""
        return with_lengths(batch, self._guard.terms)


def check_supports_graphs(builder: MetadataBuilder) -> None:
    """
    Check that a builder supports graphs where they were negotiated.

    Raises:
        PluginContractError: It does not.
    """
    agreement, name = builder.agreement, type(builder).__name__
    level = agreement.requirements.cudagraph
    if level != "never" and not builder.supports_graphs:
        raise PluginContractError(
            f"cudagraph={level!r} was negotiated with {agreement.id}, and {name} supports no graphs",
            "a manifest declares cudagraph for what its builder builds for graphs",
            f"set {name}.supports_graphs = True, and keep what a replay reads in the graph's buffers; "
            "or declare no cudagraph",
        )


def _check_graph(builder: StepBuilder, graph: GraphBuffers) -> None:
    """Check that a builder may build for a graph."""
    agreement = builder.agreement
    if builder.graph_level == "never":
        raise NotNegotiatedError(
            "graph buffers were given to build",
            f"{agreement.id} builds eagerly here: its builder supports no graphs in this agreement",
            "build with graph=None, or select again with the cudagraph level that the batch needs",
        )
    if not isinstance(graph, GraphBuffers) or not builder.state.holds(graph):
        raise BatchError(
            f"the graph buffers {graph!r} were given to a builder of {agreement.id}",
            "graph buffers belong to the state that the builder was made with, until they are released",
            "pass what builder.state.graph(shape) returns",
        )


def _refuse_uncovered(builder: StepBuilder, graph: GraphBuffers, max_query_len: int) -> NoReturn:
    """Raise for a checked batch that may not run in a graph, by the level or by the plugin (`can_capture`)."""
    raise BatchError(
        f"a batch with queries of up to {max_query_len} tokens was given for the graph {graph.key}",
        f"{builder.agreement.id} replays batches of the level {builder.graph_level!r} here, and not every one",
        "build with graph=None where can_run_in_cudagraph(batch) is False",
    )


def _check_own(builder: StepBuilder, metadata: Metadata) -> None:
    """Check that metadata is of the builder's agreement."""
    metadata_class = builder.wrapped.backend.metadata_class
    if not isinstance(metadata, metadata_class) or metadata.agreement != builder.agreement:
        raise BatchError(
            f"metadata ({type(metadata).__name__}) of another builder was given",
            f"it is a {metadata_class.__name__} built for the same agreement, {builder.agreement.id}",
            "pass what a builder of this backend returned",
        )
