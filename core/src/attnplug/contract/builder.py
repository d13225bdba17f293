"""Turns a batch into metadata: the only place that plans, once per cache group and step."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

import torch
from attrs import evolve

from attnplug.contract.calls.advance import DecodeInputs, next_decode_batch
from attnplug.contract.calls.cascade import cascade_pays
from attnplug.contract.graphs.shape import graph_level, runs_at
from attnplug.contract.guards._format import layers_text
from attnplug.contract.guards.batch import BatchGuard, BatchSplit
from attnplug.contract.guards.building import check_batch, check_covered, check_fields, check_own, check_slot, complete
from attnplug.errors import BatchError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.backend import Backend
    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.metadata import Metadata
    from attnplug.contract.state import State

_T = TypeVar("_T")
_NO_PLANS: Mapping[Hashable, Any] = MappingProxyType({})


class MetadataBuilder:
    """
    Builds metadata for the layers that share a block table and an agreement. `Backend.make_builder` constructs it.

    A plugin overrides `plan_batch` where its kernels plan, and returns ``self.describe(batch, plans=..., more=...)``; the
    default has no plans. `build` runs while the previous step may still be executing, and no more than that one:
    persistent buffers change in stream order only, and nothing in it waits for the device. One builder serves one
    thread, and one microbatch.

    Attributes:
        supports_graphs: Whether `plan_batch` keeps everything that a replay reads in the slot (`per_graph`, `persist`), at one address.
            False refuses slots.
        requires_uniform_decodes: Whether all decodes of a batch have one query length, for kernels that take a single one: the
            requests at the front that are as long as the first one are decodes then, and all others are prefills.
        backend: The backend.
        agreement: What was negotiated.
        impls: The implementations that this builder serves.
        state: Workspace, limits and ranks.
        plan_groups: The implementations by `plan_key`: one plan each.
    """

    supports_graphs: ClassVar[bool] = False
    requires_uniform_decodes: ClassVar[bool] = False

    def __init__(self, backend: Backend, impls: Sequence[AttentionImpl], state: State) -> None:
        self.backend = backend
        self.agreement = backend.agreement
        self.impls = tuple(impls)
        self.state = state
        self.limits = state.limits
        self.parallel = state.parallel
        groups: dict[Hashable, tuple[AttentionImpl, ...]] = {}
        for impl in self.impls:
            groups[impl.plan_key] = (*groups.get(impl.plan_key, ()), impl)
        self.plan_groups: Mapping[Hashable, tuple[AttentionImpl, ...]] = MappingProxyType(groups)
        self._guard = BatchGuard(
            self.agreement, self.limits, backend.device, requires_uniform_decodes=self.requires_uniform_decodes
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({layers_text(self.impls)}, of {self.agreement.id})"

    @property
    def graph_level(self) -> str:
        """The highest kind of batch that can be replayed from a graph."""
        return graph_level(self.agreement, self.limits) if self.supports_graphs else "never"

    @property
    def batch_invariant(self) -> bool:
        """Whether results may not depend on what else is in the batch: as agreed, or less where the host said so."""
        given = self.limits.batch_invariant
        return self.agreement.requirements.batch_invariant if given is None else given

    @property
    def graph_lengths(self) -> tuple[int, ...]:
        """
        The longest sequences for which a host should capture slots of their own (`GraphShape.max_seq_len`), rising.

        The default is the limits' alone: right for kernels whose work follows from the lengths on the device. Override
        it where a captured forward takes as long as its longest sequence would. Longer sequences than the last run
        eagerly.
        """
        return (self.limits.max_seq_len,)

    @final
    def build(self, batch: Batch, *, fast: bool = False, graph: GraphBuffers | None = None) -> Metadata:
        """
        Check the batch against the agreement and the limits, then plan.

        With a slot the batch is padded to its shape and written into its tensors: all that a graph reads stays where it
        is. Capture is ``build(slot.dummy_batch(self), slot=slot)``, a replay is ``build(batch, slot=slot)``.

        Args:
            batch: This step's requests.
            fast: A hint: favour the speed of this build over the speed of the forwards.
            slot: The graph slot of `State` whose tensors are written; None runs eagerly.

        Raises:
            BatchError: Numbers of the batch contradict each other, the agreement, the limits or the slot's shape.
            NotNegotiatedError: The batch, or the slot, uses what was not asked for at selection.
            TensorError: A tensor of the batch has the wrong shape, dtype or device.
            CacheError: A slot or a block is outside the cache, given twice, or the null block.
            PluginContractError: The plugin's metadata for a slot differs from that of the capture.
        """
        check_batch(batch, "build")
        if graph is None:
            batch.derived[self] = self._guard.check(batch)
            return complete(self, self.plan_batch(batch, fast=fast, graph=None))
        check_slot(self, graph)
        facts = self._guard.check(batch)
        check_covered(self, graph, batch)
        seen = graph.take(batch, self)
        seen.derived[self] = facts.in_graph(graph, self.agreement.requirements)
        return graph.seal(complete(self, self.plan_batch(seen, fast=fast, graph=graph)), self, batch)

    @final
    def can_run_in_cudagraph(self, batch: Batch) -> bool:
        """Whether a batch like this one can be replayed from a graph; a slot of its shape has to exist besides."""
        return (
            runs_at(self.graph_level, batch, self.agreement.requirements.decode_query_len)
            and not batch.common_prefix_len
            and self.can_capture(batch)
        )

    @final
    def update_block_table(
        self,
        metadata: Metadata,
        block_table: Tensor,
        slot_mapping: Tensor,
        *,
        block_table_cpu: Tensor | None = None,
        slot_mapping_cpu: Tensor | None = None,
    ) -> Metadata:
        """
        Return metadata of the same requests with another cache group's pages. The original is left alone.

        Args:
            metadata: Eager metadata of a builder with the same agreement.
            block_table: ``(num_reqs, max_blocks)`` int32.
            slot_mapping: ``(tokens,)`` int64.
            block_table_cpu: Host copy, optional on a device.
            slot_mapping_cpu: Host copy, optional on a device.

        Raises:
            BatchError: The metadata is of another agreement or made for a graph slot, or the table is too short.
            TensorError: A tensor has the wrong shape, dtype or device.
            CacheError: A slot or a block is outside the cache, given twice, or the null block.
        """
        check_own(self, metadata)
        if metadata.graph is not None:
            raise BatchError(
                f"metadata of {metadata.graph} was given to update_block_table",
                "a graph reads the slot's own tensors, and each builder has some of its own",
                "build(batch, slot=slot) with the other group's block table",
            )
        given = {"block_table": (block_table, block_table_cpu), "slot_mapping": (slot_mapping, slot_mapping_cpu)}
        fields: dict[str, Any] = {}
        for name, (tensor, host) in given.items():
            fields[name] = tensor
            fields[f"{name}_cpu"] = tensor if host is None and tensor.device.type == "cpu" else host
        batch: Batch = evolve(metadata.batch, **fields)
        batch.derived[self] = self._guard.check(batch)
        return complete(self, self.replan_block_table(metadata, batch))

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

        All is computed on the device, and the host's copies advance by one too, so that nothing waits for the sampler.
        Eager metadata is left alone; with a graph slot, the slot's tensors are written.

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
        check_own(self, metadata)
        graph = metadata.graph
        if graph is not None and graph.host_owned_inputs:
            raise BatchError(
                f"advance_step was called for {graph}",
                "its graph reads the host's own tensors, which nobody else writes",
                "advance those, and build(batch, slot=slot)",
            )
        before = metadata.batch if graph is None else graph.given(self)
        batch = next_decode_batch(before, self.agreement, num_queries, prefills_to_decodes=prefills_to_decodes)
        count = batch.num_actual_tokens
        if tokens is not None:
            tokens.check(count)
        if graph is not None:
            advanced = self.build(batch, fast=True, graph=graph)
        else:
            batch.derived[self] = self._guard.check(batch)
            advanced = complete(self, self.plan_next_step(metadata, batch))
        if tokens is not None:  # last: a refusal leaves the model's inputs as they were
            tokens.advance(before.seq_lens[:count])
        return advanced

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Sequence[int]) -> bool:
        """
        Whether attending a shared prefix once is expected to be faster than attending it in every request.

        A host sets `Batch.common_prefix_len` where it is, and 0 elsewhere. The default is the published heuristic, see
        `attnplug.contract.calls.cascade`; False where cascade was not negotiated.

        Args:
            common_prefix_len: Tokens that all requests share, in the same blocks.
            query_lens: New tokens of each request.
        """
        asked = self.agreement.requirements
        return asked.cascade and cascade_pays(
            common_prefix_len,
            query_lens,
            num_q_heads=asked.num_q_heads,
            num_kv_heads=asked.num_kv_heads,
            use_alibi=asked.alibi is not None,
            use_sliding_window=asked.sliding_window is not None,
            use_local_attention=asked.attention_chunk is not None,
            num_sms=self.backend.selection.device.num_multiprocessors or 1,
            dcp_world_size=asked.dcp_size,
        )

    def plan_batch(self, batch: Batch, *, fast: bool, graph: GraphBuffers | None) -> Metadata:
        """
        Return the metadata of a checked batch. `slot` is None unless `supports_graphs`.

        Where plans need the split, ``metadata = self.describe(batch)`` comes first, and
        ``attrs.evolve(metadata, plans=...)`` is returned.

        With a slot, the batch's device tensors are those that a graph reads, its numbers those of the captured shape
        (``max_seq_len`` a bound, ``num_actual_tokens`` padding included), and its host copies those of this step.
        """
        del fast, graph
        return self.describe(batch)

    def per_graph(self, graph: GraphBuffers, key: Hashable, make: Callable[[], _T]) -> _T:
        """
        Return `make()`, called once in the life of a slot, for this builder alone.

        Buffers and wrappers that graphs read are kept so. What all builders of a state share is kept by
        `GraphBuffers.share`.
        """
        return graph.share((self, key), make)

    def persist(self, graph: GraphBuffers | None, key: Hashable, tensor: Tensor) -> Tensor:
        """
        Return a tensor of this step as a graph may read it: without a slot itself, with one its values in memory that
        the slot keeps.

        Args:
            slot: The slot that is built into, or None.
            key: What the tensor is, among those of this builder.
            tensor: Of one shape and dtype in all builds of a slot.
        """
        return tensor if graph is None else self.per_graph(graph, key, lambda: torch.empty_like(tensor)).copy_(tensor)

    def can_capture(self, batch: Batch) -> bool:
        """Whether the kernels' launches are the same for every batch of this shape. Override it to exclude some."""
        del batch
        return True

    def replan_block_table(self, metadata: Metadata, batch: Batch) -> Metadata:
        """Return the metadata of a checked batch with other pages. The default plans anew; override it to reuse."""
        del metadata
        return self.plan_batch(batch, fast=False, graph=None)

    def plan_next_step(self, metadata: Metadata, batch: Batch) -> Metadata:
        """Return the metadata of the checked next step. The default plans anew; override it to advance a plan."""
        del metadata
        return self.plan_batch(batch, fast=True, graph=None)

    def describe(self, batch: Batch, *, plans: Mapping[Hashable, Any] | None = None, **more: Any) -> Metadata:
        """
        Return the backend's metadata for the batch that `build` was given.

        Args:
            batch: The batch, as `plan_batch` got it.
            plans: A plan per plan key.
            more: Fields of the plugin's own Metadata class.

        Raises:
            PluginContractError: The batch is another one, or the class has other fields.
        """
        facts: BatchSplit | None = batch.derived.get(self)
        if facts is None:
            raise PluginContractError(
                f"{type(self).__name__}.describe was given a batch that was not built",
                "metadata describes the batch that build has checked",
                "pass the batch of plan_batch; keep what is derived from it in fields of a Metadata subclass",
            )
        try:
            return self.backend.metadata_class(
                agreement=self.agreement,
                batch=batch,
                num_decodes=facts.num_decodes,
                num_prefills=facts.num_prefills,
                num_decode_tokens=facts.num_decode_tokens,
                num_prefill_tokens=facts.num_prefill_tokens,
                num_key_rows=facts.num_key_rows,
                highest_block=facts.highest_block,
                plans=_NO_PLANS if plans is None else plans,
                graph=facts.graph,
                state=self.state,
                **more,
            )
        except TypeError:
            check_fields(self, more)
            raise
