"""
What a vendor writes and reads: `Backend`, `AttentionImpl`, `MetadataBuilder`, `State` and `Metadata`.

Core constructs these classes, holds each object in a handle (`LoadedBackend`, `Attention`, `StepBuilder`, `Captures`),
and calls it with what the handle has checked. A host has the handles alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar

import torch
from attrs import field, frozen

from attnplug.contract.calls.block_copy import copy_between
from attnplug.contract.calls.cascade import cascade_pays
from attnplug.contract.graphs.dummy import dummy_batch
from attnplug.contract.graphs.shape import graph_level
from attnplug.contract.guards._format import layers_text
from attnplug.contract.guards.cache import cache_writers
from attnplug.contract.guards.scales import SCALELESS
from attnplug.contract.inputs.kv_cache import CacheTensor, outside_inference_mode, torch_dtype
from attnplug.contract.inputs.limits import Parallel
from attnplug.contract.inputs.phase import BatchSplit
from attnplug.errors import LayerError, NotNegotiatedError, PluginContractError
from attnplug.request.domains import FP8_DS_MLA, FP8_DS_MLA_BYTES, PER_TOKEN_HEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.kv_cache import KVCache
    from attnplug.contract.inputs.layer import Layer
    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.device import Device

CacheWrite: TypeAlias = Literal["forward", "host", "either"]

_T = TypeVar("_T")
_NO_PLANS: Final[Mapping[Hashable, Any]] = MappingProxyType({})


class Backend(ABC):
    """
    A backend, bound to what was negotiated. A plugin sets `impl_class`, and the other classes where the defaults do not
    suit. `attnplug_backend`, the plugin's hook, returns the class; `attnplug.load` constructs it and holds it in a
    `LoadedBackend`.

    Attributes:
        impl_class: The attention of one layer, with the kernels.
        builder_class: Plans a batch, once per step; override it where the kernels plan.
        metadata_class: What a build returns; extend it for tensors that the kernels read besides the batch.
        state_class: Owns the workspace; extend it for what else outlives a step.
        cache_alignment: Bytes of which addresses and strides of keys and values are multiples, where `cache_tensors` is
            the default.
        agreement: What was negotiated.
        device_properties: The device that was selected for: vendor, compute capability, number of multiprocessors.
    """

    impl_class: ClassVar[type[AttentionImpl]]
    builder_class: ClassVar[type[MetadataBuilder]]
    metadata_class: ClassVar[type[Metadata]]
    state_class: ClassVar[type[State]]
    cache_alignment: ClassVar[int] = 1

    agreement: Agreement
    device_properties: Device

    def __init__(self, agreement: Agreement, device: Device) -> None:
        self.agreement = agreement
        self.device_properties = device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, on {self.device})"

    # --- what a plugin overrides ---

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """
        Describe one layer's KV cache: the roles ``"k"`` and ``"v"``, and what else is kept for its blocks or the layer.

        The default is keys ``(num_blocks, block_size, num_kv_heads, head_size)`` and values
        ``(num_blocks, block_size, num_kv_heads, head_size_v)`` of the agreed dtype. The stride order of both is that of
        the agreed layout, and where their blocks are in memory the agreed `kv_cache_form` says: the values of a latent
        cache are the first elements of its keys. A key of fp8_ds_mla is a record of 656 bytes, and its value the 512
        codes at its beginning. Caches of ``int8_per_token_head`` and ``fp8_per_token_head`` have the roles
        ``"k_scale"`` and ``"v_scale"`` as well, ``(num_blocks, num_kv_heads, block_size)`` float32. Further roles are
        in memory as described. Dense agreements have no cache.

        Args:
            num_blocks: Blocks of the cache, the null block 0 included.
        """
        requested = self.agreement.requirements
        if not requested.paged:
            return {}
        dtype, heads = torch_dtype(self.agreement.kv_cache_dtype), requested.num_kv_heads
        size = self.agreement.block_size or 1  # an agreement with pages always has a block size
        order = (0, 2, 1, 3) if self.agreement.kv_layout == "HND" else (0, 1, 2, 3)
        widths = {"k": requested.head_size, "v": requested.head_size_v or requested.head_size}
        if self.agreement.kv_cache_dtype == FP8_DS_MLA:
            widths["k"] = FP8_DS_MLA_BYTES
        found = {
            role: CacheTensor((num_blocks, size, heads, width), dtype, 0, order, alignment=self.cache_alignment)
            for role, width in widths.items()
        }
        if self.agreement.kv_cache_dtype in PER_TOKEN_HEAD:
            scales = CacheTensor((num_blocks, heads, size), torch.float32, 0)
            found |= {"k_scale": scales, "v_scale": scales}
        return found

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the workspace that batches within these limits need. The default is 0."""
        del limits
        return 0

    @property
    def supports_max_num_splits(self) -> bool:
        """Whether `Limits.max_num_splits` is kept. Where it is not, as by default, limits that name one are refused."""
        return False

    def warmup(self, loaded: Any, shapes: Sequence[GraphShape]) -> None:
        """
        Compile and load what the first use of these batch shapes would. The default has nothing to prepare.

        Args:
            loaded: The `LoadedBackend` that holds this backend: `attnplug.contract.warm_up` runs steps through it.
            shapes: The shapes.
        """
        del loaded, shapes

    def dummy_batch(self, key: GraphShape) -> Batch:
        """
        Return a valid batch of this shape that touches nothing but the null block: for warm-up, captures, and ranks
        that have to run the model without having requests.
        """
        return dummy_batch(self.agreement, key, self.device)

    def move_blocks(self, src: KVCache, dst: KVCache, pairs: Tensor) -> None:
        """
        Copy whole blocks of one layer between caches, or inside one. Everything is checked.

        Every role that has a block axis moves. All sources are read before any block is written.

        Args:
            src: The cache that is read.
            dst: The cache that is written, on any device; may be `src`.
            pairs: ``(n, 2)`` int64 on the CPU, source and destination block.
        """
        for role, spec in dst.spec.stored.items():
            copy_between(spec, src[role], dst[role], pairs)

    # --- what a plugin uses ---

    @property
    def id(self) -> str:
        """``"backend/variant"``, the same in every process."""
        return self.agreement.id

    @property
    def variant(self) -> str:
        """The variant's name, such as ``"fa3"``."""
        return self.agreement.variant

    @property
    def device(self) -> torch.device:
        """The device type that was selected for."""
        return torch.device(self.device_properties.type)


class AttentionImpl(ABC):
    """
    One layer. `LoadedBackend.make_impl` constructs it from a layer that it has completed and checked.

    A plugin sets `cache_write` and overrides `run`, and `update_kv_cache` where a host may write the cache. Whoever
    overrides `__init__` calls this one first.

    Attributes:
        cache_write: Who writes K/V into the cache: ``"forward"``, ``"host"`` (through `write_kv`), ``"either"`` (the
            layer says; forward if it does not), or a mapping of these by phase. Rows whose slot is PAD_SLOT_ID are
            never written; a kernel that finds the place by itself, from lengths and block table, writes those of padded
            requests into the null block, which is what their rows of the block table name.
        lse_includes_sink: Whether the LSE that `run` writes counts the sink; required where both are supported.
        static_scales: Which of ``"q"``, ``"k"`` and ``"v"`` are scaled by the layer's scales when the cache is
            quantized; other scales are refused.
        graphs_read_scales: Whether kernels read the layer's scale tensors themselves, so that a captured graph computes
            with what is in them at its replay. False where a host float, or a derived tensor, is in the graph.
        needs_finite_null_block: Whether what the null block holds may reach an output where it stands for freed blocks,
            before a window or chunk: 0 times NaN is NaN. Core zeroes it in each cache that it binds for such a layer,
            and nobody writes into it then. Otherwise it may hold anything.
        query_quantization: Who quantizes queries for a quantized cache: the ``"impl"``, or the ``"host"``, which then
            passes queries in the cache's dtype.
        layer: The completed layer: no value that the agreement knows is None.
        backend: The backend that made it.
        agreement: What was negotiated.
        device: The device type that was selected for: where tensors that it makes belong.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        num_queries_per_kv: Query heads per KV head; query head h reads KV head ``h // num_queries_per_kv``.
        head_size: Size of a query and key head.
        head_size_v: Size of a value head.
        scale: Factor of the scores.
        window: Tokens attended to the left and right, ``(-1, -1)`` for all.
        logits_soft_cap: The soft cap; None for none.
        causal: Whether a token attends to no later token.
        is_paged: Whether K/V live in a paged cache; otherwise each call gets contiguous (non-paged) K/V.
        forward_writes: The phases in which `run` writes the given K/V into the cache; empty where the engine does,
            or the layer has no separate cache.
        host_writes: The phases in which the engine does, through `write_kv`.
    """

    cache_write: ClassVar[CacheWrite | Mapping[str, CacheWrite]]
    lse_includes_sink: ClassVar[bool | None] = None
    static_scales: ClassVar[frozenset[str]] = frozenset()
    graphs_read_scales: ClassVar[bool] = False
    needs_finite_null_block: ClassVar[bool] = False
    query_quantization: ClassVar[Literal["impl", "host"]] = "impl"

    layer: Layer
    backend: Backend
    agreement: Agreement
    device: torch.device
    num_q_heads: int
    num_kv_heads: int
    num_queries_per_kv: int
    head_size: int
    head_size_v: int
    scale: float
    window: tuple[int, int]
    logits_soft_cap: float | None
    causal: bool
    is_paged: bool
    forward_writes: frozenset[str]
    host_writes: frozenset[str]

    def __init__(self, layer: Layer, backend: Backend) -> None:
        agreement = backend.agreement
        requested = agreement.requirements
        self.layer = layer
        self.backend = backend
        self.agreement = agreement
        self.device = backend.device
        self.num_q_heads = requested.num_q_heads
        self.num_kv_heads = requested.num_kv_heads
        # Queries are grouped: `num_queries_per_kv` neighbors read the same KV head.
        self.num_queries_per_kv = self.num_q_heads // self.num_kv_heads
        self.head_size = requested.head_size
        self.head_size_v = requested.head_size if requested.head_size_v is None else requested.head_size_v
        self.scale = self.head_size**-0.5 if layer.scale is None else layer.scale
        self.window = layer.window
        self.logits_soft_cap = layer.logits_soft_cap
        self.causal = bool(requested.causal)
        self.is_paged = bool(requested.paged)
        self.forward_writes, self.host_writes = cache_writers(self.cache_write, layer, agreement)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layer.name!r}, of {self.agreement.id})"

    # --- what a plugin overrides ---

    @abstractmethod
    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: Any,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """
        Attend. Everything is checked; `metadata` is never None.

        Write 0, and the LSE -inf, into a row without a key: an encoder's request may have no token, and in the graph of
        a shape with one query length a padded request has a query and no key, whose rows of `query` hold anything. With
        `lse_includes_sink` that LSE is the sink; of padding it may be -inf. Eager rows beyond the actual tokens stay as
        they are.

        Where a window or chunk has passed blocks, a block table may name the null block for them. What it holds is not
        finite, unless `needs_finite_null_block` says that it has to be: a weight of 0 times NaN is NaN.

        `kv_cache` is a `KVCache`, None for dense calls only. Its ``k`` and ``v`` have the strides that were agreed on,
        blocks apart by any distance: read what they are, and assume no other. `key` and `value` are None where nothing
        is to be written: a layer that shares a KV cache, and with `kv_in_cache` any call. Its metadata may serve calls
        with K/V too.

        Of latents (`Requirements.latent`) `value` is always None: values are the first `head_size_v` elements of keys,
        in the call and in the cache, where ``v`` is a part of ``k``. Queries and keys have the latent part first.
        """

    def run_sparse(
        self,
        query: Tensor,
        key: Tensor | None,
        kv_cache: Any,
        metadata: Any,
        indices: Tensor,
        index_lens: Tensor | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """
        Attend to selected tokens, in place of `run`. Needed where the variant declares `topk`.

        What `run` says holds, but for which keys a row attends to: the cached latents in the slots of its row of
        `indices`, and no other. Write `key` before they are read, since its slots may be selected. Neither causality
        nor the lengths of the batch are applied to the selection.

        Args:
            query: As of `run`, as are the arguments that are not here.
            key: As of `run`; there is no value.
            kv_cache: The latents.
            metadata: What the builder returned.
            indices: ``(tokens, topk)`` int32 slots, ``block * block_size + offset``, in any order; -1 is no token, at
                any place. The last axis is contiguous. On a device they are not checked.
            index_lens: ``(tokens,)`` int32: entries of a row from there on are not read, and may be anything. None
                reads all.
            output: Written.
            lse: Written.
        """
        del query, key, kv_cache, metadata, indices, index_lens, output, lse
        raise PluginContractError(
            f"{type(self).__name__} has no run_sparse",
            "topk was negotiated: calls have the slots of selected tokens",
            "override run_sparse, or leave topk out of the manifest",
        )

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Tensor) -> None:
        """
        Write K/V into the cache. Everything is checked. Needed where `cache_write` says host or either.

        Of latents `value` is a part of `key`, in the cache too: to write keys is enough.
        """
        del key, value, kv_cache, slot_mapping
        raise PluginContractError(
            f"{type(self).__name__} has no update_kv_cache",
            f"cache_write={self.cache_write!r} lets the host write the cache",
            "override update_kv_cache, or declare cache_write='forward'",
        )

    def init_cache(self, kv_cache: Any) -> None:
        """
        Write what is this layer's own into its fresh cache: roles that belong to no block, such as static scales.

        `LoadedBackend.make_cache` calls it where it is given the layer. The default has nothing to write.
        """
        del kv_cache

    def parameters_changed(self) -> None:
        """
        Derive again what was derived from the layer's scales, sinks and slopes: `self.layer` has others now, or its
        tensors have other values.

        `Attention.update_scales`, `Attention.parameters_changed` and calls with other sinks call it. A plugin that
        overrides it takes all of them; one that reads them from `self.layer` in each call overrides it with nothing to
        do. The default refuses them. An override raises nothing for values that a constructor takes, and does not wait
        for the device: dense calls call it each time.

        Raises:
            NotNegotiatedError: The plugin does not override it.
        """
        raise NotNegotiatedError(
            f"layer {self.layer.name!r} of {self.agreement.id} was given scales, sinks or slopes after make_impl",
            f"{type(self).__name__} derives what it needs from them in make_impl alone",
            "make the implementation again with LoadedBackend.make_impl, and its builders, when they are known",
        )

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Run what a profiling run measures. The default leaves the output untouched."""
        del query, key, value, output, lse

    @property
    def plan_key(self) -> Hashable:
        """What a library fixes when it plans; layers with equal keys share a plan. Override it for other values."""
        return self.scale, self.agreement.requirements

    @property
    def query_dtype(self) -> torch.dtype:
        """Dtype of the queries: the layer's, or the cache's where the engine quantizes them."""
        quantized = self.query_quantization == "host" and self.agreement.kv_cache_dtype not in SCALELESS
        return torch_dtype(self.agreement.kv_cache_dtype if quantized else self.agreement.requirements.dtype)

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of the output: the layer's, or the agreed quantized one."""
        requested = self.agreement.requirements
        return torch_dtype(requested.output_quant or requested.dtype)

    @property
    def output_width(self) -> int:
        """Elements of one output row. Override it for packed quantized outputs."""
        return self.num_q_heads * self.head_size_v

    # --- what a plugin uses ---

    def plan_of(self, metadata: Metadata) -> Any:
        """
        Return the plan that the builder made for this layer.

        Raises:
            LayerError: It made none.
        """
        try:
            return metadata.plans[self.plan_key]
        except KeyError:
            raise LayerError(
                f"no plan for layer {self.layer.name!r} is in the metadata that it was given",
                f"its builder has plans ({len(metadata.plans)}) for layers with other windows, scales or soft caps"
                if metadata.plans
                else "its builder made no plans",
                "give this layer's implementation to make_builder, whose metadata it runs on",
            ) from None


class MetadataBuilder:
    """
    Plans for the layers that share a block table and an agreement. `LoadedBackend.make_builder` constructs it.

    A plugin overrides `plan_batch` where its kernels plan, and returns the fields that it adds to the metadata;
    `StepBuilder` checks the batch and assembles the rest. `plan_batch` runs while the previous step may still be
    executing, and no more than that one: persistent buffers change in stream order only, and nothing in it waits for
    the device. One builder serves one thread, and one microbatch.

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

    backend: Backend
    agreement: Agreement
    impls: tuple[AttentionImpl, ...]
    state: State
    limits: Limits
    parallel: Parallel
    plan_groups: Mapping[Hashable, tuple[AttentionImpl, ...]]

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

    @property
    def decodes_first(self) -> bool:
        """
        Whether an engine should move decodes to the front of a batch. The default is True.

        It is for kernels that compute decodes apart: they are faster there, or batch-invariant there alone. False saves
        the host that work. Each order is right.
        """
        return True

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
        The longest sequences for which an engine should capture graphs (`GraphShape.max_seq_len`), in rising order.

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
        """Whether results may not depend on what else is in the batch: as agreed, or less where the engine said so."""
        limit = self.limits.batch_invariant
        return self.agreement.requirements.batch_invariant if limit is None else limit

    def per_graph(self, graph: GraphBuffers, key: Hashable, make: Callable[[], _T]) -> _T:
        """
        Return `make()`, called once in the life of a graph's buffers, for this builder alone.

        Tensors and wrappers that a graph reads are kept so. What all builders of a state share is kept by
        `GraphBuffers.share`.
        """
        return graph.share((self, key), make)

    def persist(self, graph: GraphBuffers | None, key: Hashable, tensor: Tensor) -> Tensor:
        """
        Return a tensor of this step as a graph may read it: a copy at an address that never changes.

        Args:
            graph: The buffers that hold the copy; None returns the tensor itself.
            key: What the tensor is, among those of this builder.
            tensor: Of one shape and dtype in all builds of a graph.
        """
        return tensor if graph is None else self.per_graph(graph, key, lambda: torch.empty_like(tensor)).copy_(tensor)


class State:
    """
    Owns the workspace that all builders of one backend share. Plugins subclass it for what else must outlive a step.
    Everything in it is used in the order of one stream: microbatches on separate streams have separate states. In graph
    buffers, padded requests have no keys, and a query where all queries of the shape have one length: a kernel that
    needs a key per request pads to the null block in a separate tensor (`attnplug.batching.num_unpadded_tokens`).

    Several agreements of one backend and variant may share a state: windowed and full layers of one cache group, say.
    Its workspace has the size that any of them needs.

    Attributes:
        backend: The backend that made it.
        limits: The most that batches will need.
        parallel: The ranks that share the model.
        device: Where its tensors are.
    """

    backend: Backend
    limits: Limits
    device: torch.device
    parallel: Parallel
    _workspace: Tensor | None
    _workspace_bytes: int | None

    def __init__(
        self, backend: Backend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.device = device
        self.parallel = Parallel() if parallel is None else parallel
        self._workspace = None
        self._workspace_bytes = None

    def __repr__(self) -> str:
        most = f"{self.limits.max_num_reqs} requests and {self.limits.max_num_tokens} tokens"
        return f"{type(self).__name__}(of {self.backend.id} on {self.device}, for {most})"

    # --- what a plugin uses ---

    @property
    def workspace(self) -> Tensor:
        """
        ``(workspace_bytes,)`` uint8, zero at first use, then shared by builders and forwards in stream order.

        It has the size that the agreements of all builders need. A builder for an agreement that needs more replaces
        it by a larger one, as long as no graph holds it: what a plugin keeps of it stays valid, and large enough for
        the plugin's agreement.
        """
        if self._workspace is None:
            with outside_inference_mode():
                self._workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        return self._workspace

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace."""
        if self._workspace_bytes is None:
            self._workspace_bytes = self.backend.workspace_bytes(self.limits)
        return self._workspace_bytes

    # --- machinery ---

    def lacks(self, backend: Backend) -> bool:
        """Whether the workspace is smaller than a further agreement needs it. `Captures` calls it."""
        return backend.workspace_bytes(self.limits) > self.workspace_bytes

    def enlarge(self, backend: Backend) -> None:
        """Replace the workspace by one that is large enough for it, at its next use. `Captures` calls it."""
        self._workspace_bytes, self._workspace = backend.workspace_bytes(self.limits), None


@frozen(eq=False, kw_only=True)
class Metadata(BatchSplit):
    """
    A validated batch, its split, and the plans that were made for it. Plugins subclass it for what else their kernels
    read, decorated with ``attrs.frozen(eq=False, kw_only=True)`` as this class is.

    Any Python value in here is frozen when a graph is captured; what changes between replays is a tensor updated in
    place.

    Attributes:
        agreement: What was negotiated; a layer of another agreement refuses the metadata.
        plans: A plan per plan key, for libraries that plan.
        graph: The graph buffers whose tensors it is made of; None runs eagerly.
        state: The state of the builder that made it: workspace, limits and ranks.
    """

    agreement: Agreement = field(repr=lambda agreement: repr(agreement.id))
    plans: Mapping[Hashable, Any] = field(default=_NO_PLANS, repr=lambda plans: f"<{len(plans)}>")
    graph: GraphBuffers | None = None
    state: State | None = None


Backend.builder_class, Backend.metadata_class, Backend.state_class = MetadataBuilder, Metadata, State
