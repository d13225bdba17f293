"""One layer's attention: the part of the contract that runs on the hot path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, TypeAlias
from weakref import WeakSet

import torch

from attnplug.contract._final import final, keep_attributes
from attnplug.contract.calls.op import cache_arguments, enlist
from attnplug.contract.guards.cache import cache_writers
from attnplug.contract.guards.layer import check_call_sinks
from attnplug.contract.guards.scales import UNQUANTIZED, replace_scales
from attnplug.contract.inputs.kv_cache import torch_dtype
from attnplug.errors import LayerError, NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch import Tensor

    from attnplug.contract.backend import Backend
    from attnplug.contract.builder import MetadataBuilder
    from attnplug.contract.guards.call import ForwardGuard
    from attnplug.contract.inputs.kv_cache import KVCache
    from attnplug.contract.inputs.layer import Layer
    from attnplug.contract.metadata import Metadata
    from attnplug.negotiation.agreement import Agreement

_NO_SINKS_YET: Final = object()
"""What a layer with `sinks_with_call` is bound to before the first call: no argument is identical to it."""

CacheWrite: TypeAlias = Literal["forward", "host", "either"]


class AttentionImpl(ABC):
    """
    One layer. `Backend.make_impl` constructs it from a layer that it has completed and checked.

    A plugin sets `cache_write` and overrides `run`, and `update_kv_cache` where a host may write the cache. Whoever
    overrides `__init__` calls this one first.

    Attributes:
        cache_write: Who writes K/V into the cache: ``"forward"``, ``"host"`` (through `write_kv`), ``"either"`` (the
            layer says; forward if it does not), or a mapping of these by phase. Rows whose slot is PAD_SLOT_ID are
            never written; a kernel that finds the place by itself, from lengths and block table, writes those of padded
            requests into the null block, which is what their rows of the block table name.
        lse_includes_sink: Whether the LSE that forward returns counts the sink; required where both are supported.
        static_scales: Which of ``"q"``, ``"k"`` and ``"v"`` are scaled by the layer's scales when the cache is
            quantized; other scales are refused.
        graphs_read_scales: Whether kernels read the layer's scale tensors themselves, so that a captured graph computes
            with what is in them at its replay. False where a host float, or a derived tensor, is in the graph.
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
        forward_writes: The phases in which `run` writes the given K/V into the cache; empty where the host does,
            or the layer has no separate cache.
        host_writes: The phases in which the host does, through `write_kv`.
        cache_roles: The roles of its cache, in order.
    """

    cache_write: ClassVar[CacheWrite | Mapping[str, CacheWrite]]
    lse_includes_sink: ClassVar[bool | None] = None
    static_scales: ClassVar[frozenset[str]] = frozenset()
    graphs_read_scales: ClassVar[bool] = False
    query_quantization: ClassVar[Literal["impl", "host"]] = "impl"

    # Core sets these, and `attnplug.load` refuses a plugin that reuses one of the names: it would shadow core's value.
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
    cache_roles: tuple[str, ...] = ()
    _guard: ForwardGuard | None = None
    _handle: int = 0
    _builders: WeakSet[MetadataBuilder]
    _call_sinks: object = None

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
        self._builders = WeakSet()
        self._call_sinks = _NO_SINKS_YET if layer.sinks_with_call else None
        keep_attributes(self)

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

        `kv_cache` is a `KVCache`, None for dense calls only. Its ``k`` and ``v`` have the strides that were agreed on,
        blocks apart by any distance: read what they are, and assume no other. `key` and `value` are None where nothing
        is to be written: a layer that shares a KV cache, and with `kv_in_cache` any call. Its metadata may serve calls
        with K/V too.
        """

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Tensor) -> None:
        """Write K/V into the cache. Everything is checked. Needed where `cache_write` says host or either."""
        del key, value, kv_cache, slot_mapping
        raise PluginContractError(
            f"{type(self).__name__} has no update_kv_cache",
            f"cache_write={self.cache_write!r} lets the host write the cache",
            "override update_kv_cache, or declare cache_write='forward'",
        )

    # --- what a plugin overrides, and a host calls ---

    def init_cache(self, kv_cache: Any) -> None:
        """
        Write what is this layer's own into its fresh cache: roles that belong to no block, such as static scales.

        `Backend.make_cache` calls it where it is given the implementation. The default has nothing to write.
        """
        del kv_cache

    # --- what a plugin overrides ---

    def parameters_changed(self) -> None:
        """
        Derive again what was derived from the layer's scales and sinks: `self.layer` has others now.

        `update_scales` and calls with other sinks call it. A plugin that overrides it takes both; one that reads them
        from `self.layer` in each call overrides it with nothing to do. The default refuses them. An override raises
        nothing for values that a constructor takes.

        Raises:
            NotNegotiatedError: The plugin does not override it.
        """
        raise NotNegotiatedError(
            f"layer {self.layer.name!r} of {self.agreement.id} was given scales or sinks after make_impl",
            f"{type(self).__name__} derives what it needs from them in make_impl alone",
            "make the implementation again with Backend.make_impl, and its builders, when they are known",
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

    # --- what a plugin overrides, and a host calls ---

    @property
    def query_dtype(self) -> torch.dtype:
        """Dtype of the queries: the layer's, or the cache's where the host quantizes them."""
        quantized = self.query_quantization == "host" and self.agreement.kv_cache_dtype not in UNQUANTIZED
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

    @final
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

    # --- what a host calls ---

    @final
    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        metadata: Metadata | None,
        output: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """
        Attend, and write the result into `output`.

        Args:
            query: ``(tokens, num_q_heads, head_size)``; the last axis is contiguous, as of every tensor here.
            key: ``(tokens, num_kv_heads, head_size)`` of this step's new tokens, or of all keys for dense calls. None
                where the keys are cached already: KV sharing, cross attention after its first step, and any call where
                `kv_in_cache` was negotiated. Such a call writes nothing.
            value: ``(tokens, num_kv_heads, head_size_v)``; None exactly where `key` is.
            kv_cache: What `Backend.make_cache` or `Backend.bind_cache` returned; None for dense calls, and where a
                profiling run has none.
            metadata: What the builder of this backend returned for the step; None is a profiling run.
            output: ``(tokens, num_q_heads * head_size_v)``, written in place; rows beyond the batch's actual tokens are
                not touched.
            lse: ``(tokens, num_q_heads)`` float32, written with the natural log-sum-exp of the scaled scores; only
                where `return_lse` was negotiated.
            sinks: ``(num_q_heads,)``, as `Layer.sinks`; exactly where the layer has `sinks_with_call`. They are checked
                and taken over when they are another tensor than in the last call, which waits for the device; values
                that are changed in place are not looked for.

        A profiling run has to succeed and measures memory: its output is not attention.

        Raises:
            TensorError: A tensor has the wrong shape, dtype or device; one that is written has rows over each other,
                shares memory with another tensor of the call, requires a gradient where gradients are recorded, or is
                an inference tensor outside of inference mode.
            CacheError: The cache is not bound, bound to another agreement, or smaller than the blocks in use.
            NotNegotiatedError: LSE or sinks are given and were not negotiated.
            LayerError: Sinks are absent, not finite, or others than those that a captured graph has.
            BatchError: The metadata is not from a builder of this layer's agreement, or a later build has overwritten
                the graph buffers that it reads.
        """
        # The hot path: the guard reads attributes of the tensors only, and nothing else runs before the kernels.
        guard = self._guard or self._refuse_unbound()
        is_profiling = guard.check_call(query, key, value, kv_cache, metadata, output, lse)
        if sinks is not self._call_sinks:
            self._take_sinks(sinks)
        if is_profiling:
            self.run_profile(query, key, value, output, lse)
        else:
            self.run(query, key, value, kv_cache, metadata, output, lse)

    @final
    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache | None, slot_mapping: Tensor) -> None:
        """
        Write new K/V into the cache, apart from forward.

        Args:
            key: ``(tokens, num_kv_heads, head_size)``.
            value: ``(tokens, num_kv_heads, head_size_v)``.
            kv_cache: What `Backend.make_cache` or `Backend.bind_cache` returned; None in a profiling run.
            slot_mapping: ``(tokens,)`` int64; PAD_SLOT_ID rows are skipped.

        Raises:
            CacheError: Forward writes the cache itself, the layer has no separate cache, or a slot is outside it
                (slots on the CPU).
            TensorError: A tensor has the wrong shape, dtype or device, K/V are in the cache's own memory, or the cache
                may not be written here: a gradient, an inference tensor.
        """
        guard = self._guard or self._refuse_unbound()
        if guard.check_write(key, value, kv_cache, slot_mapping):
            self.update_kv_cache(key, value, kv_cache, slot_mapping)

    @final
    def forward_op(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        output: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """
        Do what `forward` does, as one opaque op that ``torch.compile(fullgraph=True)`` takes into its graph.

        The metadata is the one in force (`attnplug.contract.forward_context`), so that a compiled model serves every
        step. Arguments and errors are those of `forward`.
        """
        if not self._handle:
            self._refuse_unbound()
        # An op takes tensors and numbers, no objects: the handle names this implementation inside the graph.
        torch.ops.attnplug.forward(query, key, value, *cache_arguments(kv_cache), output, lse, self._handle, sinks)

    @final
    def write_kv_op(self, key: Tensor, value: Tensor, kv_cache: KVCache | None) -> None:
        """
        Do what `write_kv` does, as one opaque op, in the phases that `host_writes` names.

        The metadata in force (`attnplug.contract.forward_context`) says where the rows go; in a profiling run nothing
        is written.

        Args:
            key: ``(tokens, num_kv_heads, head_size)``, the rows of the step, of all phases.
            value: ``(tokens, num_kv_heads, head_size_v)``.
            kv_cache: What `Backend.make_cache` or `Backend.bind_cache` returned.
        """
        if not self._handle:
            self._refuse_unbound()
        torch.ops.attnplug.write_kv(key, value, *cache_arguments(kv_cache), self._handle)

    @final
    def update_scales(
        self,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        q_scale_tensor: Tensor | None = None,
        k_scale_tensor: Tensor | None = None,
        v_scale_tensor: Tensor | None = None,
    ) -> None:
        """
        Replace scales of the layer: for hosts that know them after `make_impl` only. What is not given stays.

        Arguments are those of `Layer`, checked likewise; tensors are read, which waits for the device. What is in a KV
        cache was quantized with the former scales: call it before a request writes, or reset the cache.

        A captured graph has the host floats and the addresses of the tensors. While a builder of this layer has built
        into graph buffers, scales are replaced only where `graphs_read_scales` is true, and only by the layer's own
        tensors, which the host has changed in place (``impl.layer.k_scale_tensor.fill_(value)``, then
        ``impl.update_scales(k_scale_tensor=impl.layer.k_scale_tensor)``, which renews the host float).

        Raises:
            NotNegotiatedError: Nothing applies the scale, or the implementation takes it in `make_impl` only.
            LayerError: A value is wrong, or a captured graph has the former one.
            TensorError: A tensor has the wrong shape, dtype or device.
        """
        if self._guard is None:
            self._refuse_unbound()
        given = {
            "q_scale": q_scale,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "q_scale_tensor": q_scale_tensor,
            "k_scale_tensor": k_scale_tensor,
            "v_scale_tensor": v_scale_tensor,
        }
        if all(value is None for value in given.values()):
            return
        layer = replace_scales(self.layer, given, self.agreement, self.device, self.static_scales)
        tensors = [f"{one}_scale_tensor" for one in "qkv"]
        stays = self.graphs_read_scales and all(getattr(layer, n) is getattr(self.layer, n) for n in tensors)
        self._replace_layer(layer, "scales", is_seen_by_graphs=stays)

    # --- machinery ---

    @final
    def serve(self, builder: MetadataBuilder) -> None:
        """Take note of a builder of this layer; `Backend.make_builder` hands it over."""
        self._builders.add(builder)

    def _take_sinks(self, sinks: Tensor | None) -> None:
        """Bind the sinks of a call. An alias of the bound tensor, as a compiler makes it, is the same one."""
        bound = self._call_sinks
        if not (isinstance(bound, torch.Tensor) and sinks is not None and _is_alias(bound, sinks)):
            layer = check_call_sinks(self.layer, sinks, self.agreement, self.device)
            # Before the first ones there was no call, so no graph has others.
            self._replace_layer(layer, "sinks", is_seen_by_graphs=bound is _NO_SINKS_YET)
            self._call_sinks = sinks

    def _replace_layer(self, layer: Layer, what: str, *, is_seen_by_graphs: bool) -> None:
        if not is_seen_by_graphs and any(
            graph.is_captured(builder) for builder in self._builders for graph in builder.state.graphs.values()
        ):
            raise LayerError(
                f"layer {self.layer.name!r} was given other {what}",
                f"a captured graph has the former {what}, and would go on with them",
                f"give the {what} before graph_capture, or call State.release_graphs() first and capture again",
            )
        former, self.layer = self.layer, layer
        try:
            self.parameters_changed()
        except BaseException:
            self.layer = former
            if type(self).parameters_changed is not AttentionImpl.parameters_changed:
                self.parameters_changed()  # what was derived already comes from the former values again
            raise

    @final
    def bind(self, guard: ForwardGuard, cache_roles: tuple[str, ...]) -> None:
        """Take the guard of this layer's calls and the roles of its cache; `Backend.make_impl` hands them over."""
        self._guard = guard
        self.cache_roles = cache_roles
        self._handle = enlist(self)

    def _refuse_unbound(self) -> NoReturn:
        raise LayerError(
            f"an implementation of layer {self.layer.name!r} was constructed by itself",
            "implementations are made by Backend.make_impl, which checks the layer and knows the cache",
            "call backend.make_impl(layer)",
        )


def _is_alias(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory in the same form. The first one is alive, so no other took its place."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )
