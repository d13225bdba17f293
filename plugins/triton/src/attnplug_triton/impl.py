"""One layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract import AttentionImpl
from attnplug.ops import combine, gather_heads, merge_into, write_kv, write_latents
from attnplug_triton.launch import Params, run, write_rows
from attnplug_triton.tiles import value_width_of, width_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug.contract import Batch, KVCache, Layer, Metadata
    from attnplug.ops import Ranks
    from attnplug_triton.backend import TritonBackend
    from attnplug_triton.launch import Plan

FP8_DS_MLA: Final = "fp8_ds_mla"
PER_TOKEN_HEAD: Final = ("int8_per_token_head", "fp8_per_token_head")
_FLOAT32: Final = torch.float32.itemsize
_ALIBI: Final = {None: 0, "linear": 1, "sqrt": 2}


class TritonImpl(AttentionImpl):
    """Runs the plan of its builder."""

    cache_write = "either"
    lse_includes_sink = True
    static_scales = frozenset({"k", "v"})
    graphs_read_scales = True  # kernels take the scale tensors by pointer
    backend: TritonBackend

    def __init__(self, layer: Layer, backend: TritonBackend) -> None:
        super().__init__(layer, backend)
        self._writes = bool(self.forward_writes)
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Make the arguments of the kernels that depend on the layer."""
        layer, requested = self.layer, self.agreement.requirements
        left, chunk, cap = self.window[0], layer.attention_chunk or 0, self.logits_soft_cap or 0.0
        slopes, ranks = layer.alibi_slopes, requested.dcp_size
        self._sinks = None if layer.sinks is None else layer.sinks.detach().contiguous()
        sinks = self._sinks if ranks == 1 else None  # the keys of all ranks share a sink
        self._scales = (layer.k_scale_tensor, layer.k_scale_tensor if requested.latent else layer.v_scale_tensor)
        size = self.head_size - self.head_size_v if requested.latent else self.head_size
        dtype = self.agreement.kv_cache_dtype
        self._is_records, self._is_by_token = dtype == FP8_DS_MLA, dtype in PER_TOKEN_HEAD
        is_scaled = dtype != requested.dtype and not (self._is_records or self._is_by_token)
        self._params = Params(
            numbers=(left, chunk, self.scale, cap),
            tensors=(
                None if slopes is None else slopes.float().contiguous(),
                sinks,
                *(self._scales if is_scaled else (None, None)),
            ),
            constants=(
                self.num_kv_heads, self.num_queries_per_kv * ranks, size, self.head_size_v,
                width_of(size), value_width_of(self.head_size_v),
            ),
            forms=(
                (self.causal or self.window[1] == 0) and requested.topk is None, left >= 0, chunk > 0, cap > 0,
                _ALIBI[requested.alibi], sinks is not None,
            ),
            cache_forms=(
                is_scaled, requested.per_head_scales, self.backend.reads_bits, requested.latent, self._is_records,
                self._is_by_token,
            ),
        )  # fmt: skip

        params = self._params  # the prefix has no causal mask, and what follows it no sinks
        self._of_prefix = evolve(params, forms=(False, *params.forms[1:]))
        no_sinks = (params.tensors[0], None, *params.tensors[2:])
        self._after_prefix = evolve(params, tensors=no_sinks, forms=(*params.forms[:-1], False))

    @property
    def plan_key(self) -> Hashable:
        """One key for all layers: a plan does not depend on their values."""
        return "triton"

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
        """Write the new rows to the KV cache, if there is one and forward writes them, then launch the kernels."""
        self._attend(query, key, value, kv_cache, metadata, output, lse)

    def run_sparse(
        self,
        query: Tensor,
        key: Tensor | None,
        kv_cache: KVCache,
        metadata: Metadata,
        indices: Tensor,
        index_lens: Tensor | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the new latents to the KV cache if forward writes them, then attend to the selected ones."""
        self._attend(query, key, None, kv_cache, metadata, output, lse, (indices, index_lens))

    def _attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        metadata: Metadata,
        output: Tensor,
        lse: Tensor | None,
        selection: tuple[Tensor, Tensor | None] | None = None,
    ) -> None:
        batch = metadata.batch
        if self._writes and key is not None and kv_cache is not None:
            slots: Any = batch.slot_mapping  # with K/V to write there are slots
            self.update_kv_cache(key, key[..., : self.head_size_v] if value is None else value, kv_cache, slots)
        out = output.view(-1, self.num_q_heads, self.head_size_v)
        kv: Any = (key, value) if kv_cache is None else kv_cache
        plan = self.plan_of(metadata)
        if plan.ranks is not None:
            self._attend_with_ranks(plan.ranks, query, kv, out, lse, batch, plan)
        elif plan.prefix is not None:
            self._attend_with_prefix(plan.prefix, query, kv, out, lse, batch, plan)
        else:
            run(query, kv, out, lse, batch, plan, self._params, selection)

    def _attend_with_prefix(
        self, prefix: Plan, query: Tensor, kv: KVCache, out: Tensor, lse: Tensor | None, batch: Batch, plan: Plan
    ) -> None:
        """Attend to what follows the shared prefix, then to the prefix and the sink, and merge by LSE."""
        rows = slice(batch.num_actual_tokens)
        query, out = query[rows], out[rows]
        sums = torch.empty(out.shape[:2], device=out.device) if lse is None else lse[rows]
        run(query, kv, out, sums, batch, plan, self._after_prefix)
        shared, shared_sums = torch.empty_like(out), torch.empty(out.shape[:2], device=out.device)
        run(query, kv, shared, shared_sums, batch, prefix, self._of_prefix)
        merge_into(out, sums, shared, shared_sums)

    def _attend_with_ranks(
        self, ranks: Ranks, query: Tensor, kv: KVCache, out: Tensor, lse: Tensor | None, batch: Batch, plan: Plan
    ) -> None:
        """Attend to this rank's keys for the query heads of all ranks, and merge the partial outputs by LSE."""
        rows = slice(batch.num_actual_tokens)
        heads = gather_heads(ranks.all_gather(query[rows]), self.num_kv_heads)
        partial = out.new_empty((*heads.shape[:2], self.head_size_v))
        sums = torch.full(heads.shape[:2], -torch.inf, device=out.device)  # padding of a graph is not computed
        run(heads, kv, partial, sums, batch, plan, self._params)
        found, total = combine(partial, sums, ranks, self.num_kv_heads, in_order=plan.in_order)
        if self._sinks is not None:
            without, total = total, torch.logaddexp(total, self._sinks.float())
            found.mul_((without - total).exp().unsqueeze(-1))
        out[rows] = found
        if lse is not None:
            lse[rows] = total

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Allocate and free as much memory as partial outputs of `query.shape[0]` rows take. Nothing is written."""
        del key, value, output, lse
        requested, size, of_row = self.agreement.requirements, query.element_size(), 0
        if requested.dcp_size > 1:
            of_row = self._exchanged_bytes(requested.dcp_size, size)
        elif requested.cascade:
            of_row = self.num_q_heads * (self.head_size_v * size + 2 * _FLOAT32)
        if of_row:
            query.new_empty(query.shape[0] * of_row, dtype=torch.uint8)

    def _exchanged_bytes(self, ranks: int, itemsize: int) -> int:
        """Return the bytes of a row: queries of all ranks, then partial outputs, and a part for and from each rank."""
        queries, outputs = (ranks * self.num_q_heads * size * itemsize for size in (self.head_size, self.head_size_v))
        return queries + max(queries, 3 * outputs) + (ranks * (ranks + 1) + 2) * self.num_q_heads * _FLOAT32

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
        """Write rows to their slots, with the layer's scales or their own. The values of latents are in their keys."""
        if self._is_records:
            write_latents(key, kv_cache.k, slot_mapping)
        elif self._is_by_token:
            write_rows(key, value, kv_cache, slot_mapping)
        else:
            write_kv(key, value, kv_cache.k, kv_cache.v, slot_mapping, *self._scales)
