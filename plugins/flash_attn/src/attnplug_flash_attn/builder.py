"""Plans the kernel calls of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import evolve

from attnplug.batching import num_unpadded_tokens
from attnplug.contract import MetadataBuilder
from attnplug.ops import Ranks
from attnplug_flash_attn import dcp
from attnplug_flash_attn.cascade import after_prefix, prefix_rows
from attnplug_flash_attn.kernels.interface import VarlenCall
from attnplug_flash_attn.packing import packed, rows_of_shard
from attnplug_flash_attn.passes import (
    KernelPass,
    Plan,
    Rows,
    adapted,
    call_of,
    cumulative,
    leftpad_of,
    num_splits,
    write_cumulative,
)
from attnplug_flash_attn.schedule import GraphPlans, Schedules, calls_of, carried_over, forms_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract import AttentionImpl, Batch, BatchSplit, GraphBuffers, Metadata, Phase, State
    from attnplug_flash_attn.backend import FlashAttentionBackend
    from attnplug_flash_attn.impl import FlashAttentionImpl
    from attnplug_flash_attn.schedule import ScheduledCall


class FlashAttentionBuilder(MetadataBuilder):
    """
    Makes one `Plan` per step, and a schedule per plan key if the library has schedules.

    Decodes and prefills are separate calls, since kernels tile their rows differently.
    """

    supports_graphs = True
    backend: FlashAttentionBackend

    def __init__(self, backend: FlashAttentionBackend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        required = self.agreement.requirements
        self._kernels = backend.kernels
        self._is_paged = bool(required.paged)
        self._is_cross = required.attn_type == "encoder_decoder"
        self._block_size = self.agreement.block_size or 1
        self._schedules = Schedules(self, self._kernels)
        # Graphs read it in place: they keep their builder alive, and nothing writes it.
        self._leftpad = leftpad_of(self._kernels, self.limits.max_num_reqs, state.device)
        # Chunked prefill reads pages, and kernels tile pages and rows differently. So prefills read the new K/V of the
        # call only if their results may depend on the chunks.
        self._reads_new_kv = (
            required.dtype == self.agreement.kv_cache_dtype
            and required.seq_lens_cpu_kind == "exact"
            and not required.kv_in_cache  # calls without K/V run on the same metadata
            and not (self._is_cross or self.batch_invariant)
            and all(impl.layer.kv_sharing_target is None for impl in impls)
        )
        # Such a call is made of the lengths and pages of its requests, and of nothing else.
        self._takes_plain_calls = (
            self._kernels.paged
            and not (self._kernels.cumulative_keys or self._kernels.wants_leftpad)
            and not (self._is_cross or self.batch_invariant)
        )
        self._ranks = Ranks(self.parallel, state.device) if self.parallel.dcp_size > 1 else None
        groups = cast("Mapping[Hashable, tuple[FlashAttentionImpl, ...]]", self.plan_groups)
        # A schedule depends on the plan key alone, so that scales and sinks of these may be former ones.
        self._params = {key: group[0].params for key, group in groups.items()}

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return the passes of the step, with a schedule for each plan key unless the build is fast."""
        if graph is not None and self._keeps_plans:
            return {"plans": self._plans_of_graph(batch, split, graph)}
        plan = self._plan(batch, split, graph)
        return {"plans": self._scheduled(plan, graph, schedules=graph is not None or not fast)}

    def prepare_in_graph(self, metadata: Metadata) -> None:
        """Write the rows that have keys, cumulative lengths of keys, and schedules, where the library reads those."""
        plan = next(iter(metadata.plans.values()))  # plan keys differ in their schedules alone
        for part in plan.parts:
            if part.padding is not None and part.call.seqused_k is not None:
                starts = metadata.batch.query_start_loc  # of this phase, which is the only one in a graph
                used = num_unpadded_tokens(starts, part.call.seqused_k)
                part.call.cu_seqlens_q.copy_(starts.minimum(used))
                part.padding.copy_(torch.arange(part.last, device=starts.device) >= used)
        if self._kernels.cumulative_keys:
            for _, call in calls_of(plan):
                if call.seqused_k is not None and call.cu_seqlens_k is not None:
                    write_cumulative(call.seqused_k, call.cu_seqlens_k)
        if self._keeps_plans and metadata.graph is not None:
            self._schedules.renew(self._plans_in(metadata.graph).calls)  # of the lengths that are written above

    @property
    def decodes_first(self) -> bool:
        """Where results may not depend on the call, by its tiles: one call computes decodes behind prefills as well."""
        return self.batch_invariant and self._ranks is None

    @property
    def replays_without_build(self) -> bool:
        """Where no share of a rank is made of the lengths before the replay, and no schedule of keys without pages."""
        return self._ranks is None and (self._keeps_plans or not self._kernels.schedules)

    @property
    def _keeps_plans(self) -> bool:
        """Whether the plans of a graph are made once."""
        return self._is_paged and self._kernels.paged and self._ranks is None

    def _plans_in(self, graph: GraphBuffers) -> GraphPlans:
        return self.per_graph(graph, "plans", GraphPlans)

    def replan_block_table(self, metadata: Metadata, batch: Batch, split: BatchSplit) -> dict[str, Any]:
        """Keep the schedules, which depend on lengths only. Those of another builder may be for other layers."""
        plan = self._plan(batch, split, None)
        plans = {
            key: carried_over(plan, metadata.plans[key])
            if key in metadata.plans
            else self._schedules.add(plan, key, params, None)
            for key, params in self._params.items()
        }
        return {"plans": plans}

    def _scheduled(self, plan: Plan, graph: GraphBuffers | None, *, schedules: bool = True) -> dict[Hashable, Plan]:
        """Return the plan of each plan key. A captured graph always reads its schedules."""
        if not (self._kernels.schedules and schedules):
            return dict.fromkeys(self._params, plan)
        add = self._schedules.add
        return {key: add(plan, key, params, graph) for key, params in self._params.items()}

    def _plans_of_graph(self, batch: Batch, split: BatchSplit, graph: GraphBuffers) -> Mapping[Hashable, Plan]:
        """
        Return the plans of a graph. All that is in them is frozen by the capture, but for what their tensors hold. So
        they are made once, and `prepare_in_graph` writes their schedules. Those of other tensors are what the
        comparison with the capture refuses.
        """
        kept = self._plans_in(graph)
        tensors = forms_of(batch.query_start_loc, batch.seq_lens, batch.encoder_seq_lens, batch.block_table)
        if kept.tensors == tensors:
            return kept.plans
        plan = self._plan(batch, split, graph)
        plans = self._scheduled(plan, graph)
        if not kept.plans:
            calls: list[ScheduledCall] = []
            for key, params in self._params.items() if self._kernels.schedules else ():
                calls += self._schedules.of_graph(plan, plans[key], key, params, graph)
            kept.tensors, kept.plans, kept.calls = tensors, plans, tuple(calls)
        return plans

    def _plan(self, batch: Batch, split: BatchSplit, graph: GraphBuffers | None) -> Plan:
        """Return the passes of a step, without schedules."""
        splits = num_splits(self.limits, batch.num_actual_tokens, batch_invariant=self.batch_invariant)
        if not self._is_paged:
            return Plan(prefill=self._dense(batch, splits))
        if self._ranks is not None:
            return self._dcp(batch, self._ranks, splits, graph)
        prefix = None
        if batch.common_prefix_len:
            prefix = self._paged(prefix_rows(batch, self._block_size), splits, graph, "prefix")
        decode = self._phase(batch, split.decodes, splits, graph, "decode") if split.num_decode_tokens else None
        prefill = self._phase(batch, split.prefills, splits, graph, "prefill") if split.num_prefill_tokens else None
        return Plan(decode, prefill, prefix)

    def _phase(
        self, batch: Batch, phase: Phase | None, splits: int, graph: GraphBuffers | None, name: str
    ) -> KernelPass | None:
        if phase is None:
            return None
        if name == "prefill" and graph is None and self._reads_new_kv and _starts_sequences(phase):
            return self._new_kv_pass(phase, splits, causal=batch.causal)
        if graph is None and self._takes_plain_calls and not batch.common_prefix_len:
            call = VarlenCall(
                cu_seqlens_q=phase.query_start_loc,
                max_seqlen_q=phase.max_query_len,
                max_seqlen_k=phase.max_seq_len,
                seqused_k=phase.seq_lens,
                block_table=phase.block_table,
                causal=batch.causal,
                num_splits=splits,
            )
            return KernelPass(call, phase.first_token, phase.first_token + phase.num_tokens)
        rows = self._rows(phase, causal=batch.causal)
        if batch.common_prefix_len:
            rows = after_prefix(rows, batch.common_prefix_len, self._block_size)
        return self._paged(rows, splits, graph, name)

    def _rows(self, phase: Phase, *, causal: bool) -> Rows:
        lens, lens_cpu, longest = phase.seq_lens, phase.seq_lens_cpu, phase.max_seq_len
        if self._is_cross:
            lens = cast("Tensor", phase.encoder_seq_lens)
            lens_cpu, longest = phase.encoder_seq_lens_cpu, phase.max_encoder_seq_len or 0
        return Rows(
            first=phase.first_token,
            last=phase.first_token + phase.num_tokens,
            starts=phase.query_start_loc,
            starts_cpu=phase.query_start_loc_cpu,
            longest_query=phase.max_query_len,
            lens=lens,
            lens_cpu=lens_cpu,
            longest=longest,
            table=cast("Tensor", phase.block_table),
            causal=causal,
        )

    def _new_kv_pass(self, phase: Phase, splits: int, *, causal: bool) -> KernelPass:
        """Return the pass over the new K/V of the call, which are faster to read than pages and need no packing."""
        call = VarlenCall(
            cu_seqlens_q=phase.query_start_loc,
            max_seqlen_q=phase.max_query_len,
            max_seqlen_k=phase.max_query_len,
            cu_seqlens_k=phase.query_start_loc,
            causal=causal,
            num_splits=splits,
        )
        return KernelPass(call, phase.first_token, phase.first_token + phase.num_tokens, reads_new_kv=True)

    def _paged(self, rows: Rows, splits: int, graph: GraphBuffers | None, name: str) -> KernelPass:
        call = self._with_fixed_sizes(call_of(rows, splits), name)
        if not self._kernels.paged:
            return packed(rows, call, self.state.workspace, self.agreement)
        padding = None
        if graph is not None and self._kernels.needs_keys:
            count, starts = rows.last - rows.first, call.cu_seqlens_q
            padding = self.per_graph(graph, (name, "padding"), lambda: starts.new_zeros(count, dtype=torch.bool))
            call = evolve(call, cu_seqlens_q=self.per_graph(graph, (name, "cu_seqlens_q"), starts.clone))
        return KernelPass(self._adapted(call, graph, name), rows.first, rows.last, padding=padding)

    def _adapted(self, call: VarlenCall, graph: GraphBuffers | None, name: str) -> VarlenCall:
        if graph is None:
            return adapted(call, self._kernels, self._leftpad)

        def key_starts(lens: Tensor) -> Tensor:
            return self.per_graph(graph, (name, "cu_seqlens_k"), lambda: cumulative(lens))

        return adapted(call, self._kernels, self._leftpad, key_starts)

    def _with_fixed_sizes(self, call: VarlenCall, name: str) -> VarlenCall:
        """Fix the maximum lengths for batch invariance, since libraries choose tiles by them."""
        if not self.batch_invariant:
            return call
        decodes = self.agreement.requirements.decode_query_len
        longest = decodes if name == "decode" else self.limits.max_num_tokens
        return evolve(call, max_seqlen_q=longest, max_seqlen_k=self.limits.max_seq_len)

    def _dcp(self, batch: Batch, ranks: Ranks, splits: int, graph: GraphBuffers | None) -> Plan:
        """Return the passes of a rank. A shared prefix is not treated separately."""
        plan = dcp.passes(self, batch, ranks, num_splits=splits, graph=graph)
        plan = evolve(plan, new=self._with_fixed_sizes(plan.new, "new"))
        if plan.context is None:
            return Plan(dcp=plan)
        context = self._with_fixed_sizes(plan.context, "context")
        if self._kernels.paged:
            return Plan(dcp=evolve(plan, context=self._adapted(context, graph, "context")))
        packed_context = packed(rows_of_shard(batch, plan.context), context, self.state.workspace, self.agreement)
        return Plan(dcp=evolve(plan, context=context), packed_context=packed_context)

    def _dense(self, batch: Batch, splits: int) -> KernelPass:
        """Return the pass over contiguous K/V, one request after another."""
        call = VarlenCall(
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            cu_seqlens_k=batch.key_start_loc,
            causal=batch.causal,
            num_splits=splits,
        )
        return KernelPass(self._with_fixed_sizes(call, "prefill"), 0, batch.num_actual_tokens)


def _starts_sequences(phase: Phase) -> bool:
    """Whether no request has cached keys before this step."""
    starts, lens = phase.query_start_loc_cpu, phase.seq_lens_cpu
    return lens is not None and phase.max_query_len == phase.max_seq_len and torch.equal(starts.diff(), lens)
