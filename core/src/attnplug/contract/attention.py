"""One layer, as a host has it: its calls are checked, then the vendor's implementation runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakSet

import torch

from attnplug.contract.calls.check import InProcess
from attnplug.contract.calls.op import cache_arguments, enlist
from attnplug.contract.guards.call import CallForm, ForwardGuard
from attnplug.contract.guards.layer import check_call_sinks
from attnplug.contract.guards.scales import replace_scales
from attnplug.contract.guards.selection import SelectionGuard
from attnplug.contract.inputs.kv_cache import autocast_type_of, outside_autocast
from attnplug.contract.vendor import AttentionImpl
from attnplug.errors import LayerError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from attnplug.contract.inputs.kv_cache import CacheSpec, KVCache
    from attnplug.contract.inputs.layer import Layer
    from attnplug.contract.loaded import LoadedBackend
    from attnplug.contract.vendor import Metadata
    from attnplug.negotiation.agreement import Agreement

_is_autocast_enabled: Final = torch.is_autocast_enabled  # saves two attribute look-ups per call
_NO_SINKS_YET: Final = object()
"""What a layer with `sinks_with_call` is bound to before the first call: no argument is identical to it."""


class Captured(Protocol):
    """What a layer asks the builders that serve it."""

    def has_captured(self) -> bool:
        """Whether a graph that is held reads what the builder built."""


class Attention(InProcess):
    """
    One layer, made by `LoadedBackend.make_impl`.

    Attributes:
        wrapped: The vendor's implementation.
        backend: The backend that made it.
        agreement: What was negotiated.
        device: The device type that was selected for.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Size of a query and key head.
        head_size_v: Size of a value head.
        scale: Factor of the scores.
        window: Tokens attended to the left and right, ``(-1, -1)`` for all.
        logits_soft_cap: The soft cap; None for none.
        is_paged: Whether K/V live in a paged cache; otherwise each call gets contiguous (non-paged) K/V.
        forward_writes: The phases in which `forward` writes the given K/V into the cache; empty where the engine does,
            or the layer has no separate cache.
        host_writes: The phases in which the engine does, through `write_kv`.
        plan_key: Layers with equal keys share a plan.
        query_dtype: Dtype of the queries: the layer's, or the cache's where the engine quantizes them.
        output_dtype: Dtype of the output: the layer's, or the agreed quantized one.
        output_width: Elements of one output row.
        lse_includes_sink: Whether the LSE that `forward` writes counts the sink; None where not both are served.
    """

    def __init__(self, impl: AttentionImpl, backend: LoadedBackend, cache: CacheSpec | None) -> None:
        self.wrapped = impl
        self.backend = backend
        self.agreement: Agreement = backend.agreement
        self.device: torch.device = backend.device
        # What was agreed on, and not what a plugin may keep under these names.
        requested, layer = self.agreement.requirements, impl.layer
        self.num_q_heads: int = requested.num_q_heads
        self.num_kv_heads: int = requested.num_kv_heads
        self.head_size: int = requested.head_size
        self.head_size_v: int = requested.head_size if requested.head_size_v is None else requested.head_size_v
        self.scale: float = self.head_size**-0.5 if layer.scale is None else layer.scale
        self.window: tuple[int, int] = layer.window
        self.logits_soft_cap: float | None = layer.logits_soft_cap
        self.is_paged: bool = bool(requested.paged)
        self.forward_writes: frozenset[str] = impl.forward_writes
        self.host_writes: frozenset[str] = impl.host_writes
        self.plan_key: Hashable = impl.plan_key
        self.query_dtype: torch.dtype = impl.query_dtype
        self.output_dtype: torch.dtype = impl.output_dtype
        self.output_width: int = impl.output_width
        self.lse_includes_sink: bool | None = impl.lse_includes_sink
        form = CallForm(
            query_dtype=self.query_dtype,
            output_dtype=self.output_dtype,
            output_width=self.output_width,
            host_writes=bool(self.host_writes),
            forward_writes=bool(self.forward_writes),
            cache=cache,
            metadata_class=impl.backend.metadata_class,
            kept=backend.kept_forms((self.query_dtype, self.output_dtype, self.output_width)),
        )
        self._guard = ForwardGuard(impl.layer, form, self.agreement, self.device)
        self._is_sparse = requested.topk is not None
        self._selection = SelectionGuard(layer.name, requested.topk, self.agreement.block_size)
        self._autocast_type = autocast_type_of(self.device)
        self._call_sinks: object = _NO_SINKS_YET if impl.layer.sinks_with_call else None
        self._builders: WeakSet[Captured] = WeakSet()
        self._number = enlist(self)

    def __repr__(self) -> str:
        return repr(self.wrapped)

    # --- what a host calls ---

    @property
    def layer(self) -> Layer:
        """The completed layer, with the scales and sinks of now."""
        return self.wrapped.layer

    def forward(  # noqa: PLR0913 - the tensors of a call, and those of few layers by name
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
        indices: Tensor | None = None,
        index_lens: Tensor | None = None,
    ) -> None:
        """
        Attend, and write the result into `output`. ``torch.autocast`` does not affect it.

        Args:
            query: ``(tokens, num_q_heads, head_size)``; the last axis is contiguous, as of every tensor here.
            key: ``(tokens, num_kv_heads, head_size)`` of this step's new tokens, or of all keys for dense calls. None
                where the keys are cached already: KV sharing, cross attention after its first step, and any call where
                `kv_in_cache` was negotiated. Such a call writes nothing.
            value: ``(tokens, num_kv_heads, head_size_v)``; None exactly where `key` is, and of latents, whose values
                are the first elements of their keys.
            kv_cache: What `LoadedBackend.make_cache` or `LoadedBackend.bind_cache` returned; None for dense calls, and
                where a profiling run has none.
            metadata: What the builder of this backend returned for the step; None is a profiling run.
            output: ``(tokens, num_q_heads * head_size_v)``, written in place; a row without a key is 0. Rows beyond the
                batch's actual tokens are not touched in an eager step. In a replay they are rows without a key where
                all queries of the shape have one length; in other shapes, and where the host owns the inputs and gives
                them no query, they stay as they are.
            lse: ``(tokens, num_q_heads)`` float32, written with the natural log-sum-exp of the scaled scores; only
                where `return_lse` was negotiated. Of a row without a key it is -inf, or the sink where that is counted.
            sinks: ``(num_q_heads,)``, as `Layer.sinks`; exactly where the layer has `sinks_with_call`. They are checked
                and taken over when they are another tensor than in the last call, which waits for the device; after a
                change in place, call `parameters_changed`.
            indices: ``(tokens, topk)`` int32, exactly where `topk` was negotiated: the slots of the cached tokens that
                each token attends to, ``block * block_size + offset``, each once and in any order; -1 is no token, at
                any place. The selection is all that hides tokens: causality is not applied to it. Slots may be those
                that this call writes; with `dcp_size` they are the rank's. Rows of padding have no token. A captured
                graph reads the tensor at its address: write each step's selection into it. Slots on a device are not
                checked, and kernels may read at addresses beyond the KV cache for others: see `check_indices`. A
                profiling run may have none.
            index_lens: ``(tokens,)`` int32: entries of a row from there on are not read. None reads all.

        A profiling run has to succeed and measures memory: its output is not attention.

        Raises:
            TensorError: A tensor has the wrong shape, dtype or device; one that is written has rows over each other,
                shares memory with another tensor of the call, requires a gradient where gradients are recorded, or is
                an inference tensor outside of inference mode.
            CacheError: The cache is not bound, bound to another agreement, or smaller than the blocks in use.
            NotNegotiatedError: LSE, sinks or indices are given and were not negotiated.
            LayerError: Sinks are absent, not finite, or others than those that a captured graph has.
            BatchError: The metadata is not from a builder of this layer's agreement, or a later build has overwritten
                the graph buffers that it reads.
        """
        # The hot path: the guard reads attributes of the tensors only, and nothing else runs before the kernels.
        is_profiling = self._guard.check_call(query, key, value, kv_cache, metadata, output, lse)
        if self._is_sparse or indices is not None or index_lens is not None:
            self._check_selection(indices, index_lens, query, kv_cache, metadata, (output, lse))
        if sinks is not self._call_sinks:
            self._take_sinks(sinks)
        if is_profiling:
            self.wrapped.run_profile(query, key, value, output, lse)
        elif indices is not None:
            with outside_autocast(self.device):
                self.wrapped.run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
        elif _is_autocast_enabled(self._autocast_type):
            with outside_autocast(self.device):  # it would change the dtypes that were negotiated
                self.wrapped.run(query, key, value, kv_cache, metadata, output, lse)
        else:
            self.wrapped.run(query, key, value, kv_cache, metadata, output, lse)

    def write_kv(self, key: Tensor, value: Tensor | None, kv_cache: KVCache | None, slot_mapping: Tensor) -> None:
        """
        Write new K/V into the cache, apart from forward.

        Args:
            key: ``(tokens, num_kv_heads, head_size)``.
            value: ``(tokens, num_kv_heads, head_size_v)``; None of latents.
            kv_cache: What `LoadedBackend.make_cache` or `LoadedBackend.bind_cache` returned; None in a profiling run.
            slot_mapping: ``(tokens,)`` int64; PAD_SLOT_ID rows are skipped.

        Raises:
            CacheError: Forward writes the cache itself, the layer has no separate cache, or a slot is outside it
                (slots on the CPU).
            TensorError: A tensor has the wrong shape, dtype or device, K/V are in the cache's own memory, or the cache
                may not be written here: a gradient, an inference tensor.
        """
        if self._guard.check_write(key, value, kv_cache, slot_mapping):
            if value is None:  # of latents
                value = key[..., : self.head_size_v]
            self.wrapped.update_kv_cache(key, value, kv_cache, slot_mapping)

    def check_indices(self, indices: Tensor, kv_cache: KVCache, index_lens: Tensor | None = None) -> None:
        """
        Check the slots of selected tokens, which waits for the device: for tests of a host, and to find a wild read.

        `forward` does so itself where they are on the CPU.

        Args:
            indices: As of `forward`.
            kv_cache: The latents.
            index_lens: As of `forward`.

        Raises:
            CacheError: A slot is outside the KV cache.
        """
        self._selection.check_slots(indices, index_lens, kv_cache.num_blocks)

    def forward_op(  # noqa: PLR0913 - as `forward`
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        output: Tensor,
        *,
        lse: Tensor | None = None,
        sinks: Tensor | None = None,
        indices: Tensor | None = None,
        index_lens: Tensor | None = None,
    ) -> None:
        """
        Do what `forward` does, as one opaque op that ``torch.compile(fullgraph=True)`` takes into its graph.

        The metadata is the one in force (`attnplug.contract.forward_context`), so that a compiled model serves every
        step. Arguments and errors are those of `forward`.
        """
        # An op takes tensors and numbers, no objects: the number names this layer inside the graph.
        cache = cache_arguments(kv_cache)
        more = (self._number, sinks, indices, index_lens)
        torch.ops.attnplug.forward(query, key, value, *cache, output, lse, *more)

    def write_kv_op(self, key: Tensor, value: Tensor | None, kv_cache: KVCache | None) -> None:
        """
        Do what `write_kv` does, as one opaque op, in the phases that `host_writes` names.

        The metadata in force (`attnplug.contract.forward_context`) says where the rows go; in a profiling run nothing
        is written.

        Args:
            key: ``(tokens, num_kv_heads, head_size)``, the rows of the step, of all phases.
            value: ``(tokens, num_kv_heads, head_size_v)``; None of latents.
            kv_cache: What `LoadedBackend.make_cache` or `LoadedBackend.bind_cache` returned.
        """
        torch.ops.attnplug.write_kv(key, value, *cache_arguments(kv_cache), self._number)

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
        Replace scales of the layer: for engines that know them after `make_impl` only. What is not given stays.

        Arguments are those of `Layer`, checked likewise; tensors are read, which waits for the device. What is in a KV
        cache was quantized with the former scales: call it before a request writes, or reset the cache.

        A captured graph has the host floats and the addresses of the tensors. While a builder of this layer has built
        into graph buffers, scales are replaced only where `AttentionImpl.graphs_read_scales` is true, and only by the
        layer's own tensors, which the host has changed in place (``impl.layer.k_scale_tensor.fill_(value)``, then
        ``impl.update_scales(k_scale_tensor=impl.layer.k_scale_tensor)``, which renews the host float).

        Raises:
            NotNegotiatedError: Nothing applies the scale, or the implementation takes it in `make_impl` only.
            LayerError: A value is wrong, or a captured graph has the former one.
            TensorError: A tensor has the wrong shape, dtype or device.
        """
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
        layer = replace_scales(self.layer, given, self.agreement, self.device, self.wrapped.static_scales)
        tensors = [f"{one}_scale_tensor" for one in "qkv"]
        stays = self.wrapped.graphs_read_scales and all(getattr(layer, n) is getattr(self.layer, n) for n in tensors)
        self._replace_layer(layer, "scales", is_seen_by_graphs=stays)

    @property
    def takes_parameters_late(self) -> bool:
        """Whether the plugin takes sinks, slopes and scales after `make_impl`: it overrides `parameters_changed`."""
        return type(self.wrapped).parameters_changed is not AttentionImpl.parameters_changed

    def parameters_changed(self) -> None:
        """
        Let the plugin derive again from the layer's sinks and slopes: the engine has written into these tensors.

        Kernels that read the tensors themselves see the write without it; what was derived from them does not. It does
        not wait for the device, and does not check values.

        Raises:
            NotNegotiatedError: The implementation takes them in `make_impl` only.
            LayerError: A captured graph has what was derived from the former values.
        """
        self._replace_layer(self.layer, "parameters", is_seen_by_graphs=False)

    # --- machinery ---

    def served_by(self, builder: Captured) -> None:
        """Register a builder that serves this layer. Called by `LoadedBackend.make_builder`."""
        self._builders.add(builder)

    def _check_selection(
        self,
        indices: Tensor | None,
        index_lens: Tensor | None,
        query: Tensor,
        kv_cache: KVCache | None,
        metadata: Metadata | None,
        written: Sequence[Tensor | None],
    ) -> None:
        if metadata is None and indices is None and index_lens is None:
            return
        tensors = [(name, one) for name, one in zip(("output", "lse"), written, strict=True) if one is not None]
        if kv_cache is not None and self.forward_writes:
            tensors += [("the KV cache", one) for one in kv_cache.tensors.values()]
        self._selection.check_call(indices, index_lens, query, tensors)
        if indices is not None and indices.is_cpu and metadata is not None and kv_cache is not None:
            rows = slice(0, metadata.batch.num_actual_tokens)
            lens = None if index_lens is None else index_lens[rows]
            self._selection.check_slots(indices[rows], lens, kv_cache.num_blocks)

    def _take_sinks(self, sinks: Tensor | None) -> None:
        """Bind the sinks of a call. torch.compile may pass an alias of the bound tensor: it counts as the same."""
        bound = self._call_sinks
        if not (isinstance(bound, torch.Tensor) and sinks is not None and _is_alias(bound, sinks)):
            layer = check_call_sinks(self.layer, sinks, self.agreement, self.device)
            # Before the first ones there was no call, so no graph has others.
            self._replace_layer(layer, "sinks", is_seen_by_graphs=bound is _NO_SINKS_YET)
            self._call_sinks = sinks

    def _replace_layer(self, layer: Layer, what: str, *, is_seen_by_graphs: bool) -> None:
        if not is_seen_by_graphs and any(builder.has_captured() for builder in self._builders):
            raise LayerError(
                f"layer {self.layer.name!r} was given other {what}",
                f"a captured graph has the former {what}, and would go on with them",
                f"give the {what} before graph_capture, or call Captures.release_graphs() first and capture again",
            )
        impl, former = self.wrapped, self.layer
        impl.layer = layer
        try:
            impl.parameters_changed()
        except BaseException:
            impl.layer = former
            if self.takes_parameters_late:
                impl.parameters_changed()  # what was derived already comes from the former values again
            raise


def _is_alias(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory in the same form. The first one is alive, so no other took its place."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )
