"""Turns a batch into metadata: the only place that plans, once per cache group and step."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch

from attnplug.contract._final import final, keep_attributes
from attnplug.contract.calls.advance import DecodeInputs, next_decode_batch
from attnplug.contract.calls.cascade import cascade_pays
from attnplug.contract.graphs.buffers import GraphBuffers
from attnplug.contract.graphs.capture import is_capturing
from attnplug.contract.graphs.shape import graph_level, runs_at
from attnplug.contract.guards._format import layers_text
from attnplug.contract.guards.batch import BatchGuard, refuse_batch
from attnplug.contract.inputs.batch import Batch, with_fields
from attnplug.contract.inputs.exact import exact_batch, with_lengths
from attnplug.contract.metadata import assemble
from attnplug.errors import BatchError, NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.backend import Backend
    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.inputs.exact import Lengths
    from attnplug.contract.inputs.limits import Limits, Parallel
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.metadata import Metadata
    from attnplug.contract.state import State
    from attnplug.negotiation.agreement import Agreement

_T = TypeVar("_T")


class MetadataBuilder:
    """
    Builds metadata for the layers that share a block table and an agreement. `Backend.make_builder` constructs it.

    A plugin overrides `plan_batch` where its kernels plan, and returns the fields that it adds to the metadata; core
    assembles the rest. `build` runs while the previous step may still be executing, and no more than that one:
    persistent buffers change in stream order only, and nothing in it waits for the device. One builder serves one
    thread, and one microbatch.

    Attributes:
        supports_graphs: Whether `plan_batch` keeps everything that a replay reads in the graph's buffers (`per_graph`,
            `persist`), at one address. False refuses graphs.
        requires_uniform_decodes: Whether all decodes of a batch have one query length, for kernels that take a single
            one: the requests at the front that are as long as the first one are decodes then, all others prefills.
        backend: The backend.
        agreement: What was negotiated.
        impls: The implementations that this builder serves.
        state: Workspace, limits and ranks.
        limits: The state's: the most that batches need.
        parallel: The state's: the ranks that share the model.
        plan_groups: The implementations by `plan_key`: one plan each.
    """

    supports_graphs: ClassVar[bool] = False
    requires_uniform_decodes: ClassVar[bool] = False

    # Core sets these, and `attnplug.load` refuses a plugin that reuses one of the names: it would shadow core's value.
    backend: Backend
    agreement: Agreement
    impls: tuple[AttentionImpl, ...]
    state: State
    limits: Limits
    parallel: Parallel
    plan_groups: Mapping[Hashable, tuple[AttentionImpl, ...]]
    _guard: BatchGuard

    def __init__(self, backend: Backend, impls: Sequence[AttentionImpl], state: State) -> None:
        self.backend = backend
        self.agreement = backend.agreement
        self.impls = tuple(impls)
        self.state = state
        self.limits = state.limits
        self.parallel = state.parallel
        # Layers with equal plan keys share a plan: planning costs host time in every step, so it runs once per key.
        groups: dict[Hashable, tuple[AttentionImpl, ...]] = {}
        for impl in self.impls:
            groups[impl.plan_key] = (*groups.get(impl.plan_key, ()), impl)
        self.plan_groups = MappingProxyType(groups)
        self._guard = BatchGuard(
            self.agreement, self.limits, backend.device, requires_uniform_decodes=self.requires_uniform_decodes
        )
        keep_attributes(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({layers_text([impl.layer.name for impl in self.impls])}, of {self.agreement.id})"

    # --- what a plugin overrides ---

    def plan_batch(
        self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None
    ) -> Mapping[str, Any]:
        """
        Return the fields that this plugin adds to the metadata of a batch: none by default.

        ``{"plans": {key: ... for key in self.plan_groups}}`` has one plan per plan key, which `AttentionImpl.plan_of`
        looks up; every other name is a field of the backend's own `metadata_class`.

        With a graph, the batch's device tensors are those that the graph reads, its numbers those of the captured shape
        (``max_seq_len`` a bound, ``num_actual_tokens`` padding included), and its CPU copies those of this step.

        Args:
            batch: This step's requests, checked.
            split: How they divide into decodes and prefills (`BatchSplit.decodes`, `BatchSplit.prefills`).
            fast: A hint: favor the speed of this build over the speed of the forwards.
            graph: The buffers of the CUDA graph that is captured or replayed with the metadata; None runs eagerly, and
                always unless `supports_graphs`.
        """
        del batch, split, fast, graph
        return {}

    def replan_block_table(self, metadata: Metadata, batch: Batch, split: BatchSplit) -> Mapping[str, Any]:
        """
        Return the fields for the same requests with another block table, as `plan_batch` does.

        The default plans anew; override it to reuse the plans of `metadata`, which may come from another builder of the
        same agreement, for other layers.
        """
        del metadata
        return self.plan_batch(batch, split, fast=False, graph=None)

    def plan_next_step(self, metadata: Metadata, batch: Batch, split: BatchSplit) -> Mapping[str, Any]:
        """
        Return the fields for the next decode step, as `plan_batch` does.

        The default plans anew; override it to advance the plans of `metadata`, which is left as it is.
        """
        del metadata
        return self.plan_batch(batch, split, fast=True, graph=None)

    def prepare_in_graph(self, metadata: Metadata) -> None:
        """
        Compute on the device what a replay reads and what follows from its inputs: index tensors from lengths, say.

        The default has nothing to compute. An override launches work that reads the tensors of the metadata's batch,
        and writes tensors that `per_graph` keeps. It reads no CPU copy and no number that differs between steps, keeps
        no new tensor, and does not wait for the device: a graph may record it.

        `build` calls it for each step of a graph, after `plan_batch`. A host that calls `prepare` inside the capture
        records it: then each replay runs it, and `build` does not.

        Args:
            metadata: What `build` returns for a graph.
        """
        del metadata

    def can_capture(self, batch: Batch) -> bool:
        """
        Whether the kernels' launches are the same for every batch of this shape.

        The default is True. Override it to exclude some.
        """
        del batch
        return True

    # --- what a plugin overrides, and a host calls ---

    @property
    def replays_without_build(self) -> bool:
        """
        Whether `prepare_in_graph` computes all that changes from step to step, from the tensors of the batch alone.

        Then a graph that records `prepare` may be replayed again without a `build`, after its input tensors changed on
        the device: several decode steps in a row, or lengths that the CPU does not know yet. The default is False:
        `plan_batch` reads CPU copies.
        """
        return False

    @property
    def graph_lengths(self) -> tuple[int, ...]:
        """
        The longest sequences for which a host should capture graphs (`GraphShape.max_seq_len`), in rising order.

        The default is the limits' alone: right for kernels whose work follows from the lengths on the device. Override
        it where a captured forward takes as long as its longest sequence would. Longer sequences than the last run
        eagerly.
        """
        return (self.limits.max_seq_len,)

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Sequence[int]) -> bool:
        """
        Whether attending to a shared prefix once is expected to be faster than attending to it in every request.

        A host sets `Batch.common_prefix_len` where it is, and 0 elsewhere. The default is the published heuristic, see
        `attnplug.contract.calls.cascade`; False where cascade was not negotiated.

        Args:
            common_prefix_len: Tokens that all requests share, in the same blocks.
            query_lens: New tokens of each request.
        """
        requested = self.agreement.requirements
        return requested.cascade and cascade_pays(
            common_prefix_len,
            query_lens,
            num_q_heads=requested.num_q_heads,
            num_kv_heads=requested.num_kv_heads,
            use_alibi=requested.alibi is not None,
            use_sliding_window=requested.sliding_window is not None,
            use_local_attention=requested.attention_chunk is not None,
            num_sms=self.backend.device_properties.num_multiprocessors or 1,
            dcp_world_size=requested.dcp_size,
        )

    # --- what a plugin uses ---

    @property
    def graph_level(self) -> str:
        """The highest kind of batch that can be replayed from a graph."""
        return graph_level(self.agreement, self.limits) if self.supports_graphs else "never"

    @property
    def batch_invariant(self) -> bool:
        """Whether results may not depend on what else is in the batch: as agreed, or less where the host said so."""
        limit = self.limits.batch_invariant
        return self.agreement.requirements.batch_invariant if limit is None else limit

    @final
    def per_graph(self, graph: GraphBuffers, key: Hashable, make: Callable[[], _T]) -> _T:
        """
        Return `make()`, called once in the life of a graph's buffers, for this builder alone.

        Tensors and wrappers that a graph reads are kept so. What all builders of a state share is kept by
        `GraphBuffers.share`.
        """
        return graph.share((self, key), make)

    @final
    def persist(self, graph: GraphBuffers | None, key: Hashable, tensor: Tensor) -> Tensor:
        """
        Return a tensor of this step as a graph may read it: a copy at an address that never changes.

        Args:
            graph: The buffers that hold the copy; None returns the tensor itself.
            key: What the tensor is, among those of this builder.
            tensor: Of one shape and dtype in all builds of a graph.
        """
        return tensor if graph is None else self.per_graph(graph, key, lambda: torch.empty_like(tensor)).copy_(tensor)

    # --- what a host calls ---

    @final
    def build(self, batch: Batch, *, fast: bool = False, graph: GraphBuffers | None = None) -> Metadata:
        """
        Check the batch against the agreement and the limits, then plan.

        With a graph the batch is padded to its shape and copied into its buffers, whose addresses never change.
        Capture with ``build(graph.dummy_batch(self), graph=graph)``, replay with ``build(batch, graph=graph)``.

        Args:
            batch: This step's requests.
            fast: A hint: favor the speed of this build over the speed of the forwards.
            graph: The graph buffers of `State` that are written; None runs eagerly.

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
            return assemble(self, split, self.plan_batch(split.batch, split, fast=fast, graph=None))
        _check_graph(self, graph)
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
        fields = self.plan_batch(split.batch, split, fast=fast, graph=graph)
        metadata = graph.seal(assemble(self, split, fields, graph), self, given)
        if not graph.prepares_itself(self):
            self.prepare_in_graph(metadata)
        return metadata

    @final
    def prepare(self, metadata: Metadata) -> None:
        """
        Prepare a replay on the device, from inside the graph. Optional, and right in every place.

        A host calls it before the first layer, inside the capture, once for each builder. From then on each replay
        prepares itself, from what the input tensors hold at that time, and `build` leaves that work out. A graph that
        is captured again has to record it again. Outside a capture it repeats what `build` did; for eager metadata
        there is nothing to do.

        Args:
            metadata: What this builder's last build for the graph returned.

        Raises:
            BatchError: The metadata is of another builder, of an earlier step, or of a graph that was released.
        """
        _check_own(self, metadata)
        graph = metadata.graph
        if graph is None:
            return
        _check_graph(self, graph)
        if not graph.is_current(metadata, self):
            raise BatchError(
                f"metadata of {graph} was given to prepare",
                "its graph reads the tensors of another builder, or a later build has overwritten them",
                "pass what the last build of this builder returned, or that of the capture",
            )
        if is_capturing(self.state.device):
            graph.keep_prepared(self)
        self.prepare_in_graph(metadata)

    @final
    def can_run_in_cudagraph(self, batch: Batch) -> bool:
        """
        Whether a batch like this one can be replayed from a graph; one of its shape has to be captured besides.

        Lengths that the agreement reads from the device are read here, once, and `build` reads them no more.
        """
        return self.covers(*self.exact(batch))

    @final
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
        return assemble(self, split, self.replan_block_table(metadata, split.batch, split))

    @final
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
            advanced = assemble(self, split, self.plan_next_step(metadata, split.batch, split))
        if tokens is not None:  # last: a refusal leaves the model's inputs as they were
            tokens.advance(before.seq_lens[:count])
        return advanced

    # --- machinery ---

    def exact(self, batch: Batch, *, is_read: bool = False) -> tuple[Batch, Lengths]:
        """Return a batch as plugins see it, and its lengths; see `exact_batch`."""
        return exact_batch(batch, self._guard.terms, is_read=is_read)

    def covers(self, batch: Batch, lengths: Lengths) -> bool:
        """Whether an exact batch can be replayed from a graph; see `runs_at`."""
        longest = self.agreement.requirements.decode_query_len
        return (
            not batch.common_prefix_len
            and runs_at(self.graph_level, lengths.query_len, longest)
            and self.can_capture(batch)
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


def _check_graph(builder: MetadataBuilder, graph: GraphBuffers) -> None:
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


def _refuse_uncovered(builder: MetadataBuilder, graph: GraphBuffers, max_query_len: int) -> NoReturn:
    """Raise for a checked batch that may not run in a graph, by the level or by the plugin (`can_capture`)."""
    raise BatchError(
        f"a batch with queries of up to {max_query_len} tokens was given for the graph {graph.key}",
        f"{builder.agreement.id} replays batches of the level {builder.graph_level!r} here, and not every one",
        "build with graph=None where can_run_in_cudagraph(batch) is False",
    )


def _check_own(builder: MetadataBuilder, metadata: Metadata) -> None:
    """Check that metadata is of the builder's agreement."""
    metadata_class = builder.backend.metadata_class
    if not isinstance(metadata, metadata_class) or metadata.agreement != builder.agreement:
        raise BatchError(
            f"metadata ({type(metadata).__name__}) of another builder was given",
            f"it is a {metadata_class.__name__} built for the same agreement, {builder.agreement.id}",
            "pass what a builder of this backend returned",
        )
