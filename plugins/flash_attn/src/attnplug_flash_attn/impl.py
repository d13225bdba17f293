"""One layer on the kernels of a library."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from attrs import evolve

from attnplug.contract import AttentionImpl, CacheViews, torch_dtype
from attnplug.errors import LayerError
from attnplug.ops import merge_into, quantize_queries, write_kv
from attnplug_flash_attn import dcp
from attnplug_flash_attn.kernels.interface import LayerParams
from attnplug_flash_attn.packing import packed_rows

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug import Agreement
    from attnplug.contract import Layer, Metadata
    from attnplug_flash_attn.backend import FlashAttentionBackend
    from attnplug_flash_attn.dcp import DcpPlan
    from attnplug_flash_attn.kernels.interface import Kernels, VarlenCall
    from attnplug_flash_attn.passes import KernelPass, Plan


class FlashAttentionImpl(AttentionImpl):
    """
    Runs the passes that its builder has made. All that does not change from call to call is made here once.

    Attributes:
        kernels: The library.
        terms: What the layer brings to each call.
        other_terms: The same for a pass that is merged with one of `terms`: a sink enters the softmax once.
    """

    cache_write = "either"
    lse_includes_sink = True
    static_scales: ClassVar[frozenset[str]] = frozenset("qkv")

    def __init__(self, layer: Layer, backend: FlashAttentionBackend) -> None:
        super().__init__(layer, backend)
        required = self.agreement.requirements
        self.kernels = backend.kernels
        self.params = self._params(layer)
        self.params_without_sinks = evolve(self.params, sinks=None)
        self._key = (self.window, self.logits_soft_cap)
        self._heads_v = (self.num_q_heads, self.head_size_v)
        self._is_one_tensor = required.head_size_v == required.head_size
        self._caches = CacheViews(_keys_and_values)
        self._writes = bool(self.forward_writes)
        self._scale_tensors = (layer.k_scale_tensor, layer.v_scale_tensor)
        self._query_scale = layer.q_scale_tensor  # there wherever the cache is quantized

    @property
    def plan_key(self) -> Hashable:
        """What a schedule depends on. All else is told with each call."""
        return self._key

    def _params(self, layer: Layer) -> LayerParams:
        dtype = torch_dtype(self.agreement.requirements.dtype)
        slopes, sinks = layer.alibi_slopes, layer.sinks
        return LayerParams(
            softmax_scale=self.scale,
            window=self.window,
            softcap=self.logits_soft_cap or 0.0,
            alibi_slopes=None if slopes is None else slopes.float().contiguous(),
            sinks=None if sinks is None else sinks.detach().to(dtype).contiguous(),  # fa4 trains parameters
            q_descale=_flat(layer.q_scale_tensor),
            k_descale=_flat(layer.k_scale_tensor),
            v_descale=_flat(layer.v_scale_tensor),
        )

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: Metadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the rows into the cache where forward does, then run the passes of the plan."""
        plan: Plan = metadata.plans.get(self._key) or self.plan_of(metadata)
        if kv_cache is None:
            keys, values, rows = cast("Tensor", key), cast("Tensor", value), metadata.num_key_rows
            if keys.shape[0] != rows:
                keys, values = keys[:rows], values[:rows]
        else:
            keys, values = self._pages(kv_cache)
            if self._writes and key is not None and value is not None:
                write_kv(key, value, keys, values, cast("Tensor", metadata.batch.slot_mapping), *self._scale_tensors)
        if self._query_scale is not None:
            query = quantize_queries(query, self._query_scale)
        out = output.view(-1, *self._heads_v)
        if plan.dcp is not None:
            new = cast("tuple[Tensor, Tensor]", (key, value))  # no layer shares a cache here: all bring theirs
            self._attend_shard(plan, plan.dcp, query, new, (keys, values), out, lse)
            return
        if plan.prefix is not None:
            self._attend_twice(plan.parts, plan.prefix, query, keys, values, out, lse)
            return
        for part in plan.parts:
            given = self._given(part, key, value) if part.reads_new_kv else (keys, values)
            self._attend(part, query, *given, out, lse, self.params)

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Take as much memory as a step of so many rows, and let go of it. The output is left alone."""
        del key, value, output, lse
        query.new_empty(scratch_bytes(self.agreement, self.kernels, query.shape[0]), dtype=torch.uint8)

    def _given(self, part: KernelPass, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Return the rows of prompts that have no key in the cache from before.

        Raises:
            LayerError: The layer shares the cache of another: its own builder reads pages.
        """
        if key is None or value is None or self.layer.kv_sharing_target is not None:
            raise LayerError(
                f"layer {self.layer.name!r} was run on metadata of prompts whose keys come with the call",
                f"it reads the cache of {self.layer.kv_sharing_target!r}, and the builder did not know of it",
                "give all layers that run on its metadata to make_builder",
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
        """Attend the rows of a part."""
        if part.first or part.last != query.shape[0]:
            rows = slice(part.first, part.last)
            query, out, lse = query[rows], out[rows], None if lse is None else lse[rows]
        if part.slots is not None:
            keys, values = packed_rows(part, keys, values)
        self.kernels.attend(query, keys, values, out, part.call, params, lse)

    def _attend_twice(
        self,
        parts: tuple[KernelPass, ...],
        prefix: KernelPass,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend the shared prefix and the rest apart, and merge. The sink is in the prefix alone."""
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
        """Attend this rank's share of the cached keys for all ranks, and the new ones."""
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
        """Attend keys that come with the call, or those of this rank's pages, for a library that reads no pages."""
        if plan.packed_context is None or plan.dcp is None or call is not plan.dcp.context:
            self.kernels.attend(query, keys, values, out, call, params, lse)
            return
        for part in plan.packed_context.calls:
            self._attend(part, query, keys, values, out, lse, params)

    def _pages(self, kv_cache: Any) -> tuple[Tensor, Tensor]:
        return self._caches.of(kv_cache) if self._is_one_tensor else (kv_cache["k"], kv_cache["v"])

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Tensor) -> None:
        """Write the rows into their slots, with the layer's scales."""
        write_kv(key, value, *self._pages(kv_cache), slot_mapping, *self._scale_tensors)


def _flat(scale: Tensor | None) -> Tensor | None:
    """Return a view ``(1,)`` or ``(kv_heads,)``: what the host writes into its scale later is seen."""
    return None if scale is None else scale.view(-1)


def _keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = kv_cache.unbind(0)
    return keys, values


_FLOAT32: Final = torch.float32.itemsize
_SUMS_OF_RANKS: Final = 3
"""Float32 results of all ranks' heads that are held at once: weighted, in the order of ranks, and exchanged."""


def scratch_bytes(agreement: Agreement, kernels: Kernels, rows: int) -> int:
    """
    Return the most bytes that a step of so many query rows holds at once.

    What a library takes for itself is not in it: partial results where it splits keys, of few rows as a rule.

    Args:
        agreement: What was agreed on.
        kernels: The library.
        rows: Query rows.
    """
    required = agreement.requirements
    width, cached = torch_dtype(required.dtype).itemsize, torch_dtype(agreement.kv_cache_dtype).itemsize
    of_query, of_result = (
        required.num_q_heads * required.head_size,
        required.num_q_heads * (required.head_size_v or required.head_size),
    )
    ranks = required.dcp_size
    held = of_query * cached if cached != width else 0
    result = of_result * width + required.num_q_heads * _FLOAT32
    if not kernels.fills_output:
        held += ranks * result
    if ranks > 1:
        queries = 2 * ranks * of_query * cached  # as they come from all ranks, and by KV head
        sums = ranks * (ranks + 2) * required.num_q_heads * _FLOAT32
        held += result + queries + ranks * result + sums + _SUMS_OF_RANKS * ranks * of_result * _FLOAT32
    elif required.cascade:
        held += result + required.num_q_heads * _FLOAT32
    return rows * held
