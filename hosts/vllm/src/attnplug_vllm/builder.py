"""vLLM's metadata builder of a group of layers: one builder of the contract for each agreement in the group."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import finalize, ref

import torch
from attrs import evolve, field, frozen
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from attnplug.contract import PAD_SLOT_ID, Batch, GraphShape
from attnplug.errors import BatchError, NotNegotiatedError
from attnplug_vllm import facts
from attnplug_vllm.binding import bind, impls_of, load, settle, share_state
from attnplug_vllm.spans import LayerSpans, spans_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from attnplug import Requirements, Selection
    from attnplug.contract import GraphBuffers, LoadedBackend, StepBuilder
    from attnplug_vllm.impl import LayerImpl

LEVELS: Final[Mapping[str, str]] = {
    "never": "NEVER",
    "single_token_decode": "UNIFORM_SINGLE_TOKEN_DECODE",
    "uniform_batch": "UNIFORM_BATCH",
    "always": "ALWAYS",
}
"""Graph levels of the contract, rising, and vLLM's names of them."""

Shape = tuple[int, int, "int | None"]
"""Requests, tokens and query length of a captured step; None where query lengths differ."""


@dataclass
class StepMetadata(AttentionMetadata):  # type: ignore[misc]  # vLLM is no dependency, and untyped here
    """
    One step's metadata of a group of layers. vLLM copies its fields where it wraps a builder.

    Attributes:
        parts: The metadata of each agreement, by the backend of its layers.
        common: What vLLM gave.
        num_actual_tokens: Query tokens, padding included.
        slot_mapping: The slots of the step's K/V. KV connectors read it.
        late: The builder, where its layer was not made yet; None once there are parts.
    """

    parts: Any
    common: Any
    num_actual_tokens: int
    slot_mapping: Any
    late: GroupBuilder | None = None

    def bind(self, impl: LayerImpl, layer: Any, query: Tensor, pool: Tensor) -> None:
        """
        Bind a layer that was made after its builder, and build the step for it.

        Args:
            impl: The layer's implementation, which nothing has bound yet.
            layer: What vLLM passes with a call, its quantization scales.
            query: The queries. They have the layer's dtype, which outside of a model is not the default dtype.
            pool: The layer's KV cache, likewise.

        Raises:
            NoBackendError: What was decided on cannot serve the dtype, or the flag `causal` of the step.
        """
        assert self.late is not None  # noqa: S101 - for the type checker
        self.parts, self.late = self.late.build_for(impl, layer, query, pool, self.common), None


@frozen(eq=False)
class Part:
    """
    The layers of a group that share an agreement.

    Attributes:
        backend: Their backend.
        builder: Their builder.
        spans: How the layers have spans, those of images; None where they do not.
        graphs: The graph buffers that it has captured, each with the addresses that the graph reads.
    """

    backend: LoadedBackend
    builder: StepBuilder
    spans: LayerSpans | None = None
    graphs: dict[Shape, tuple[GraphBuffers, tuple[int, ...]]] = field(factory=dict)

    def build(self, batch: Batch, common: Any, *, fast: bool) -> Any:
        """Return the metadata of these layers, in the buffers of a graph that vLLM may replay."""
        if self.spans is not None:
            batch = self.spans.of(batch, common)
        graph = self.graph_of(batch) if self.graphs else None
        if graph is None and batch.slot_mapping_cpu is not None and self.backend.agreement.requirements.kv_sharing:
            unwritten = self.slots_of(batch.slot_mapping_cpu)
            batch = evolve(batch, slot_mapping=unwritten, slot_mapping_cpu=unwritten)
        return self.builder.build(batch, fast=fast, graph=graph)

    def slots_of(self, slots: Tensor) -> Tensor:
        """
        Return the slots that these layers write: those of vLLM, or on the CPU none where they share a KV cache.

        vLLM's fast prefill leaves out queries of such layers, and not their slots, which are compared on the CPU.
        """
        shares = slots.is_cpu and self.backend.agreement.requirements.kv_sharing
        return torch.full_like(slots, PAD_SLOT_ID) if shares else slots

    def graph_of(self, batch: Batch) -> GraphBuffers | None:
        """
        Return the buffers that a step of this shape is replayed from; None runs eagerly.

        A drafter passes steps of the same shape in its own tensors, which no graph of the target reads.
        """
        reqs, tokens = batch.num_reqs, batch.num_actual_tokens
        found = self.graphs.get((reqs, tokens, batch.max_query_len)) or self.graphs.get((reqs, tokens, None))
        if found is None or batch.common_prefix_len or (found[1] and found[1] != addresses(batch)):
            return None
        return found[0]


def addresses(batch: Batch) -> tuple[int, ...]:
    """Return where the tensors of a batch are that a graph reads."""
    tensors = (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping, batch.dcp_local_seq_lens)
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class GroupBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # see above
    """
    The builder of a group of layers.

    Attributes:
        choice: The identifiers of the candidates that may be chosen; empty where attnplug decides.
        parts: The layers by agreement.
    """

    choice: ClassVar[tuple[str, ...]] = ()
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **further: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **further)
        context = vllm_config.compilation_config.static_forward_context
        # vLLM's own tests make a builder before its layer, which is in no model: it is bound in its first step.
        self._awaited = layer_names[0] if len(layer_names) == 1 and layer_names[0] not in context else None
        self._layers = {} if self._awaited else {name: context[name] for name in layer_names}
        self.parts: tuple[Part, ...] = ()
        self._lacks_pools = False
        if self._layers:
            self._bind_layers()

    def _bind_layers(self) -> None:
        """Settle, load and bind the layers; from then on steps are built for them."""
        vllm_config = self.vllm_config
        self.parts = tuple(self._make_parts())
        # Memory that vLLM 0.26 discards while it sleeps: it makes builders where it allocates KV caches.
        in_pool = bool(vllm_config.model_config.enable_cumem_allocator)
        self._bindings_in_pool = [layer.impl.binding for layer in self._layers.values()] if in_pool else []
        requested = [part.backend.agreement.requirements for part in self.parts]
        self._is_paged, self._causal = bool(requested[0].paged), bool(requested[0].causal)
        self._is_exact = all(one.seq_lens_cpu_kind == "exact" for one in requested)
        self._is_local = requested[0].dcp_size > 1
        decodes_first = any(part.builder.decodes_first for part in self.parts)
        self._init_reorder_batch_threshold(  # without one, vLLM leaves requests where they are
            1 if decodes_first else None,
            supports_spec_as_decode=min(r.decode_query_len for r in requested) > 1,
            supports_dcp_with_varlen=not decodes_first,
        )
        # A microbatch is cut out of a step into new tensors; all other steps are in the runner's own, which never move.
        self._owns_inputs = bool(getattr(vllm_config.parallel_config, "use_ubatching", False))
        self._lacks_pools = self._is_paged or in_pool
        finalize(self, _release, [ref(layer.impl) for layer in self._layers.values()]).atexit = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(part.builder) for part in self.parts)})"

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the highest graph level that the backends of all layers of this class support."""
        del kv_cache_spec
        levels = [impl.selection.agreement.cudagraph for impl in impls_of(vllm_config) if impl.choice == cls.choice]
        return AttentionCGSupport[LEVELS[min(levels, key=list(LEVELS).index, default="never")]]

    # --- what vLLM calls in each step ---

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:  # noqa: FBT001, FBT002 - vLLM's signature
        """
        Return the metadata of a step.

        Args:
            common_prefix_len: Tokens at the start that all requests share; 0 since vLLM 0.32.
            common_attn_metadata: vLLM's `CommonAttentionMetadata`.
            fast_build: Whether to favor the speed of this build over the speed of the forwards.

        Raises:
            ContractError: The batch contradicts the agreement, the limits or a captured graph.
        """
        if self._awaited:
            return replace(self._metadata({}, common_attn_metadata), late=self)
        if self._lacks_pools:
            self._take_pools()
        batch = self._batch(common_attn_metadata, common_prefix_len)
        parts = {part.backend: part.build(batch, common_attn_metadata, fast=fast_build) for part in self.parts}
        return self._metadata(parts, common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """
        Return metadata that a CUDA graph is captured with, or that of a dummy step which is replayed from one.

        Raises:
            ContractError: The agreed graph level does not allow the shape, or the layer is not made yet.
        """
        if self._awaited:
            raise NotNegotiatedError(
                f"vLLM captures a graph of {self._awaited!r}, a layer that no model has",
                "a layer that is made after its builder is bound in its first eager step",
                "run a step first, or make the layer before the builder",
            )
        if self._lacks_pools:
            self._take_pools()
        batch = self._batch(common_attn_metadata, 0, dummy=True)
        shape = self._shape_of(batch)
        parts = {part.backend: self._capture(part, shape, batch) for part in self.parts}
        return self._metadata(parts, common_attn_metadata)

    def update_block_table(self, metadata: StepMetadata, blk_table: Tensor, slot_mapping: Tensor) -> StepMetadata:
        """
        Return metadata of the same step with the pages of this group.

        Args:
            metadata: What the builder of another group returned.
            blk_table: ``(num_reqs, max_blocks)`` int32.
            slot_mapping: ``(tokens,)`` int64.

        Raises:
            ContractError: As for `build`.
        """
        common = metadata.common.replace(block_table_tensor=blk_table, slot_mapping=slot_mapping)
        if self._awaited:
            return GroupBuilder.build(self, 0, common)
        others = {other.agreement: other for other in metadata.parts.values() if other.graph is None}
        if self._lacks_pools or any(part.backend.agreement not in others for part in self.parts):
            # Not `self.build`: the batch is already what a wrapper of vLLM makes of it.
            parts = GroupBuilder.build(self, 0, common).parts
        else:
            slots = _first(slot_mapping, common.num_actual_tokens)
            parts = {
                part.backend: part.builder.update_block_table(
                    others[part.backend.agreement], blk_table, part.slots_of(slots)
                )
                for part in self.parts
            }
        found = copy(metadata)  # of the wrapper's class, with what it has added
        for name, value in vars(self._metadata(parts, common)).items():
            setattr(found, name, value)
        return found

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Any, *facts: Any, **further: Any) -> bool:
        """Whether a shared prefix is attended to once (before 0.32): what else vLLM passes, the agreements have."""
        del facts, further
        lens = query_lens.tolist()
        return all(part.builder.use_cascade_attention(common_prefix_len, lens) for part in self.parts)

    # --- machinery ---

    def build_for(self, impl: LayerImpl, layer: Any, query: Tensor, pool: Tensor, common: Any) -> Any:
        """Bind the layer that was waited for, and return the parts of its step; see `StepMetadata.bind`."""
        if self._awaited:
            known, is_causal = impl.selection.requirements, bool(common.causal)
            requested = known.evolve(
                dtype=str(query.dtype).removeprefix("torch."),
                causal=is_causal,
                mm_prefix=known.mm_prefix and is_causal,
            )
            impl.selection = facts.select(requested, (impl.selection.id,))
            impl.requirements = impl.selection.requirements
            layer.impl = impl
            if requested.paged:
                self.kv_cache_spec: Any = replace(self.kv_cache_spec, dtype=pool.dtype)
            self._layers, self._awaited = {self._awaited: layer}, None
            self._bind_layers()
            self._lacks_pools = False  # the call that binds the layer has its pool
        return GroupBuilder.build(self, 0, common).parts

    def _make_parts(self) -> Iterator[Part]:
        spec, config, layers = self.kv_cache_spec, self.vllm_config, self._layers
        groups: dict[tuple[str, Requirements], tuple[Selection, list[str]]] = {}
        for name, layer in layers.items():
            selection = settle(layer.impl, layer, spec, config)
            groups.setdefault((selection.id, selection.requirements), (selection, []))[1].append(name)
        for selection, names in groups.values():
            backend = load(selection, spec, config)
            attns = [bind(layers[name].impl, layers[name], name, backend) for name in names]
            state = share_state(backend, {name: layers[name].impl for name in names}, spec, config)
            spans = spans_of(selection.requirements, [layers[name] for name in names], config)
            yield Part(backend, backend.make_builder(attns, state), spans)

    def _take_pools(self) -> None:
        """Bind the pools with the first step, which vLLM runs after it has made them, and outside of their memory."""
        if self._bindings_in_pool:
            for impl in (layer.impl for layer in self._layers.values()):
                if impl.binding in self._bindings_in_pool:  # another microbatch's builder may have replaced it
                    impl.binding = None
            self._bindings_in_pool = []
            self.parts = tuple(self._make_parts())
        for layer in self._layers.values():
            pool = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
            if pool.numel():
                layer.impl.take_pool(layer, pool)
        self._lacks_pools = False

    def _batch(self, common: Any, common_prefix_len: int, *, dummy: bool = False) -> Batch:
        """Return vLLM's metadata as a batch. Its tensors are vLLM's, cut to the step; nothing waits for the device."""
        reqs, tokens = int(common.num_reqs), int(common.num_actual_tokens)
        if common.causal is not self._causal:
            _refuse_causal(common.causal, causal=self._causal)
        starts, starts_cpu = _first(common.query_start_loc, reqs + 1), _first(common.query_start_loc_cpu, reqs + 1)
        seq_lens = _first(common.seq_lens, reqs)
        if not self._is_paged:
            return Batch(
                query_start_loc=starts,
                query_start_loc_cpu=starts_cpu,
                key_start_loc=starts,
                key_start_loc_cpu=starts_cpu,
                seq_lens=seq_lens,
                seq_lens_cpu=starts_cpu.diff(),
                num_reqs=reqs,
                num_actual_tokens=tokens,
                max_query_len=int(common.max_query_len),
                max_seq_len=int(common.max_seq_len),
                causal=self._causal,
            )
        table, slots = _first(common.block_table_tensor, reqs), _first(common.slot_mapping, tokens)
        is_host = table.is_cpu
        local = common.dcp_local_seq_lens if self._is_local else None
        return Batch(
            query_start_loc=starts,
            query_start_loc_cpu=starts_cpu,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens if is_host else self._seq_lens_cpu(common, reqs),
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=int(common.max_query_len),
            max_seq_len=int(common.max_seq_len),
            block_table=table,
            block_table_cpu=table if is_host else None,
            slot_mapping=slots,
            slot_mapping_cpu=slots if is_host else None,
            causal=self._causal,
            common_prefix_len=common_prefix_len,
            dcp_local_seq_lens=None if local is None else _first(local, reqs),
            dcp_local_seq_lens_cpu=None if local is None else _local_lens_cpu(common, reqs),
            # Defaults of these are computed.
            encoder_seq_lens_cpu=None,
            max_encoder_seq_len=None,
            key_start_loc_cpu=None,
            mm_prefix_range_cpu=None,
            # A dummy run of vLLM names no slot. On the CPU its pages are looked at: they may be of requests that ended.
            # With ranks that share a context, another one may write all of a step.
            dummy=dummy
            or (is_host and common.dcp_local_seq_lens is None and tokens > 0 and not bool((slots >= 0).any())),
        )

    def _seq_lens_cpu(self, common: Any, reqs: int) -> Tensor | None:
        """Return the CPU lengths: exact where they were agreed on, else bounds, or None."""
        lens = getattr(common, "_seq_lens_cpu", None)
        if lens is None:
            lens = common.seq_lens_cpu_upper_bound
        if lens is None and self._is_exact:
            lens = common.seq_lens.cpu()
        return None if lens is None else _first(lens, reqs)

    def _shape_of(self, batch: Batch) -> Shape:
        """Return the shape that a step is captured with: of one query length, unless graphs take mixed batches."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        reqs, tokens = batch.num_reqs, batch.num_actual_tokens
        is_uniform = mode.separate_routine() and tokens == reqs * batch.max_query_len
        return reqs, tokens, batch.max_query_len if is_uniform else None

    def _capture(self, part: Part, shape: Shape, batch: Batch) -> Any:
        """Build into the graph buffers of a shape, which are made at its first capture."""
        state, builder = part.builder.state, part.builder
        if shape in part.graphs:
            graph = part.graphs[shape][0]
            return builder.build(graph.dummy_batch(builder) if self._owns_inputs else batch, graph=graph)
        state.begin_capture(state.limits.max_num_reqs)
        try:
            graph = state.graph(GraphShape(*shape), host_owned_inputs=not self._owns_inputs)
            metadata = builder.build(graph.dummy_batch(builder) if self._owns_inputs else batch, graph=graph)
        except BaseException:
            state.abort_capture()
            raise
        state.end_capture()
        part.graphs[shape] = (graph, () if self._owns_inputs else addresses(batch))
        return metadata

    @staticmethod
    def _metadata(parts: Mapping[LoadedBackend, Any], common: Any) -> StepMetadata:
        return StepMetadata(parts, common, common.num_actual_tokens, common.slot_mapping)


@cache
def make_builder_class(choice: tuple[str, ...] = ()) -> type[GroupBuilder]:
    """
    Return the class of the builders of a choice.

    Args:
        choice: The identifiers of the candidates that may be chosen; empty leaves it to attnplug and its settings.
    """
    return type("AttnplugBuilder", (GroupBuilder,), {"choice": choice, "__module__": __name__})


def _release(impls: list[ref[LayerImpl]]) -> None:
    """Let the layers of a builder that is garbage-collected go of their pools and their state."""
    # vLLM keeps models for longer than the memory of their KV caches: after a profiling run, and when an engine ends. A
    # layer that another builder serves binds its pool again in the next step.
    for impl in (one() for one in impls):
        if impl is not None:
            impl.release()


def _first(tensor: Tensor, count: int) -> Tensor:
    """Return the first entries: vLLM's tensors may be longer than a step."""
    return tensor if tensor.shape[0] == count else tensor[:count]


def _local_lens_cpu(common: Any, reqs: int) -> Tensor | None:
    lens = getattr(common, "dcp_local_seq_lens_cpu", None)
    if lens is None:
        lens = getattr(common, "dcp_local_seq_lens_cpu_upper_bound", None)
    return None if lens is None else _first(lens, reqs)


def _refuse_causal(given: Any, *, causal: bool) -> None:
    if isinstance(given, torch.Tensor) or bool(given) is not causal:
        raise BatchError(
            f"vLLM's metadata has causal={'a flag per request' if isinstance(given, torch.Tensor) else given}",
            f"causal={causal} was negotiated for all requests of these layers",
            "leave --attention-backend out for this model: vLLM then chooses one of its own",
        )
