"""One layer on the kernels of a library."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from attrs import evolve

from attnplug.contract import AttentionImpl, torch_dtype
from attnplug.errors import LayerError
from attnplug.ops import merge_into, quantize_queries, write_kv
from attnplug_flash_attn import dcp
from attnplug_flash_attn.kernels.interface import LayerParams
from attnplug_flash_attn.packing import packed_rows

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug import Agreement
    from attnplug.contract import KVCache, Layer, Metadata
    from attnplug_flash_attn.backend import FlashAttentionBackend
    from attnplug_flash_attn.dcp import DcpPlan
    from attnplug_flash_attn.kernels.interface import Kernels, VarlenCall
    from attnplug_flash_attn.passes import KernelPass, Plan


class FlashAttentionImpl(AttentionImpl):
    """
    Runs the passes of its builder. Everything that does not change between calls is made in the constructor.

    Attributes:
        kernels: The kernel library.
        params: The parameters of the layer.
        params_without_sinks: The same for a pass that is merged with one of `params`: the softmax includes a sink once.
    """

    cache_write = "either"
    lse_includes_sink = True
    needs_finite_null_block = True  # torch's varlen_attn let NaN through on an H200; FlashAttention 3 of vLLM did not
    static_scales: ClassVar[frozenset[str]] = frozenset("qkv")
    graphs_read_scales = True  # kernels and cache writes take views of the scale tensors

    def __init__(self, layer: Layer, backend: FlashAttentionBackend) -> None:
        super().__init__(layer, backend)
        self.kernels = backend.kernels
        self.parameters_changed()
        self._latent = self.agreement.requirements.latent
        self._key = (self.window, self.logits_soft_cap)
        self._writes = bool(self.forward_writes)

    def parameters_changed(self) -> None:
        """Make the parameters of the kernels that depend on the layer's scales and sinks."""
        layer = self.layer
        self.params = self._params(layer)
        self.params_without_sinks = evolve(self.params, sinks=None)
        self._scale_tensors = (layer.k_scale_tensor, layer.v_scale_tensor)
        self._query_scale = layer.q_scale_tensor  # set if the KV cache is quantized

    @property
    def plan_key(self) -> Hashable:
        """The values that a schedule depends on. All others are arguments of each call."""
        return self._key

    def _params(self, layer: Layer) -> LayerParams:
        dtype = torch_dtype(self.agreement.requirements.dtype)
        slopes, sinks = layer.alibi_slopes, layer.sinks
        return LayerParams(
            softmax_scale=self.scale,
            window=self.window,
            softcap=self.logits_soft_cap or 0.0,
            alibi_slopes=None if slopes is None else slopes.float().contiguous(),
            sinks=None
            if sinks is None
            else sinks.detach().to(dtype).contiguous(),  # fa4 computes gradients of parameters
            q_descale=_flat(layer.q_scale_tensor),
            k_descale=_flat(layer.k_scale_tensor),
            v_descale=_flat(layer.v_scale_tensor),
        )

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        metadata: Metadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write K/V into the cache unless the host does, then run the passes of the plan."""
        plan: Plan = metadata.plans.get(self._key) or self.plan_of(metadata)
        if kv_cache is None:
            keys, values, rows = cast("Tensor", key), cast("Tensor", value), metadata.num_key_rows
            if rows and keys.shape[0] != rows:  # 0: only the device knows, and all rows are keys
                keys, values = keys[:rows], values[:rows]
        else:
            keys, values = kv_cache.k, kv_cache.v
            if self._latent:
                key, value, keys = _rotary_parts(key, keys, self.head_size_v)
            if self._writes and key is not None and value is not None:
                slots: Any = metadata.batch.slot_mapping  # with K/V to write there are slots; a cast is a call
                write_kv(key, value, keys, values, slots, *self._scale_tensors)
        if self._query_scale is not None:
            query = quantize_queries(query, self._query_scale)
        out = output.view(-1, self.num_q_heads, self.head_size_v)
        if plan.dcp is not None:
            new = cast("tuple[Tensor, Tensor]", (key, value))  # DCP excludes layers that share a KV cache
            self._attend_shard(plan, plan.dcp, query, new, (keys, values), out, lse)
            return
        if plan.prefix is not None:
            self._attend_with_prefix(plan.parts, plan.prefix, query, keys, values, out, lse)
            return
        params = self.params
        for part in plan.parts:
            if part.reads_new_kv:
                self._attend(part, query, *self._new_kv(part, key, value), out, lse, params)
            else:
                self._attend(part, query, keys, values, out, lse, params)

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Allocate and free as much memory as a step of `query.shape[0]` rows. The output is not written."""
        del key, value, output, lse
        query.new_empty(scratch_bytes(self.agreement, self.kernels, query.shape[0]), dtype=torch.uint8)

    def _new_kv(self, part: KernelPass, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the new K/V of prefills without cached keys."""
        if key is None or value is None or self.layer.kv_sharing_target is not None:
            raise LayerError(
                f"layer {self.layer.name!r} ran with metadata of prefills that read the K/V of the call",
                f"it reads the KV cache of {self.layer.kv_sharing_target!r}, and was not passed to this builder",
                "pass all layers that share its metadata to make_builder",
            )
        if not part.first and part.last == key.shape[0]:
            return key, value
        return key[part.first : part.last], value[part.first : part.last]

    def _attend(
        self,
        part: KernelPass,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor | None,
        params: LayerParams,
    ) -> None:
        """Run a pass for its rows."""
        if part.first or part.last != query.shape[0]:
            rows = slice(part.first, part.last)
            query, out, lse = query[rows], out[rows], None if lse is None else lse[rows]
        if part.slots is not None:
            keys, values = packed_rows(part, keys, values)
        self.kernels.attend(query, keys, values, out, part.call, params, lse)
        if part.padding is not None:
            out.masked_fill_(part.padding.view(-1, 1, 1), 0)
            if lse is not None:
                lse.masked_fill_(part.padding.view(-1, 1), -torch.inf)

    def _attend_with_prefix(
        self,
        parts: tuple[KernelPass, ...],
        prefix: KernelPass,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend to the shared prefix and to the rest, and merge by LSE. Only the prefix pass has the sink."""
        rows = prefix.last
        query, out = query[:rows], out[:rows]
        sums = out.new_empty(out.shape[:2], dtype=torch.float32) if lse is None else lse[:rows]
        for part in parts:
            self._attend(part, query, keys, values, out, sums, self.params_without_sinks)
        shared, shared_sums = out.new_empty(out.shape), sums.new_empty(sums.shape)
        self._attend(prefix, query, keys, values, shared, shared_sums, self.params)
        merge_into(out, sums, shared, shared_sums)

    def _attend_shard(
        self,
        plan: Plan,
        dcp_plan: DcpPlan,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend to this rank's cached keys for all ranks, and to the new keys."""
        run = self.kernels.attend if plan.packed_context is None else partial(self._attend_packed, plan)
        new = dcp.as_cached(self, new[0], dcp_plan.values(new[1]))
        dcp.attend(dcp_plan, query, new, pages, out, lse, run=run, params=self.params)

    def _attend_packed(
        self,
        plan: Plan,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        """Attend to new keys, or to those of this rank's pages, for a library without paged kernels."""
        if plan.packed_context is None or plan.dcp is None or call is not plan.dcp.context:
            self.kernels.attend(query, keys, values, out, call, params, lse)
            return
        for part in plan.packed_context.calls:
            self._attend(part, query, keys, values, out, lse, params)

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
        """Write K/V into their slots, with the layer's scales."""
        keys = kv_cache.k
        if self._latent:  # `value` is the rest of the key
            key, keys = key[..., self.head_size_v :], keys[..., self.head_size_v :]
        write_kv(key, value, keys, kv_cache.v, slot_mapping, *self._scale_tensors)


def _rotary_parts(key: Tensor | None, pages: Tensor, latent: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return new keys and values, and pages of keys: of latents, a key of the library is the rotary part alone."""
    pages = pages[..., latent:]
    return (None, None, pages) if key is None else (key[..., latent:], key[..., :latent], pages)


def _flat(scale: Tensor | None) -> Tensor | None:
    """Return a view ``(1,)`` or ``(kv_heads,)``, so that the kernels read later changes of the scale."""
    return None if scale is None else scale.view(-1)


_FLOAT32: Final = torch.float32.itemsize


def scratch_bytes(agreement: Agreement, kernels: Kernels, rows: int) -> int:
    """
    Return the peak scratch memory of a step in bytes.

    It excludes the library's allocations: partial outputs of split-KV, usually of few rows.

    Args:
        agreement: The agreement.
        kernels: The kernel library.
        rows: The number of query rows.
    """
    required = agreement.requirements
    width, cached = torch_dtype(required.dtype).itemsize, torch_dtype(agreement.kv_cache_dtype).itemsize
    of_query = required.num_q_heads * required.head_size
    of_output = required.num_q_heads * (required.head_size_v or required.head_size)
    ranks = required.dcp_size
    total = of_query * cached if cached != width else 0
    result = of_output * width + required.num_q_heads * _FLOAT32
    copied = 0 if kernels.fills_output else ranks * result
    if ranks > 1:
        queries = ranks * of_query * cached
        sums = (ranks * (ranks + 1) + 2) * required.num_q_heads * _FLOAT32
        # The queries of all ranks are ordered by KV head; the outputs of their heads then become a part for each rank,
        # and the parts of all ranks arrive at once where they are added in order.
        exchanged = sums + 2 * ranks * of_output * width
        total += queries + max(queries, ranks * result + max(copied, exchanged))
        copied = 0
    elif required.cascade:
        total += result + required.num_q_heads * _FLOAT32
    return rows * (total + copied)
