"""A backend on FlashAttention 3's calls, and a recording fake of those."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from attnplug.batching import max_local_tokens_per_dcp_rank, num_local_tokens_per_dcp_rank
from attnplug.contract import AttentionImpl, Backend, Metadata, MetadataBuilder, torch_dtype, upload
from attnplug.ops import merge_attention_states, write_pages

# --- the fake -------------------------------------------------------------------------------------------------------


class Library:
    """Records each call; outputs are the number of the call, LSEs are 0."""

    def __init__(self):
        self.scheduled: list[dict[str, Any]] = []
        self.attended: list[dict[str, Any]] = []
        self.groups: list[Any] = []

    def get_scheduler_metadata(self, **given):
        assert given["cache_seqlens"].dtype == torch.int32
        self.scheduled.append(given)
        return given["cache_seqlens"].new_full((1 + -(-given["batch_size"] // 4) * 4,), len(self.scheduled))

    def flash_attn_varlen_func(self, q, k, v, *, out, **given):
        assert given["cu_seqlens_q"][-1] == q.shape[0]
        assert given["s_aux"] is None or given["s_aux"].shape == (q.shape[1],)
        self.attended.append({"q": q, "k": k, "v": v, "out": out, **given})
        out.fill_(len(self.attended))
        return out, torch.zeros(q.shape[1], q.shape[0])  # (heads, tokens)

    def all_gather_heads(self, query, group):
        self.groups.append(group)
        return torch.cat([query] * group.size, 1)

    def combine_over_ranks(self, out, lse, group):
        """Rescale by the ranks' LSEs, and keep this rank's heads."""
        self.groups.append(group)
        heads = out.shape[1] // group.size
        return out[:, :heads], lse[:, :heads]


fa3 = Library()

# --- the sketch -----------------------------------------------------------------------------------------------------


@frozen(eq=False, kw_only=True)
class Pass:
    """One varlen call: whose rows and which keys, and the library's schedule of it."""

    rows: slice
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seqused_k: Tensor
    max_seqlen_k: int
    block_table: Tensor | None
    causal: bool
    is_sharded: bool = False
    scheduler_metadata: Tensor | None = None


@frozen(eq=False, kw_only=True)
class FlashAttentionMetadata(Metadata):
    num_splits: int = 0


class FlashAttentionImpl(AttentionImpl):
    cache_write = "either"
    lse_includes_sink = True
    static_scales = frozenset({"q", "k", "v"})
    query_quantization = "host"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch, rows = metadata.batch, output.unflatten(1, (self.num_q_heads, self.head_size))
        if kv_cache is not None and self.forward_writes and key is not None:
            self.update_kv_cache(key, value, kv_cache, batch.slot_mapping)
        pages = (key, value) if kv_cache is None else (kv_cache.k, kv_cache.v)
        passes, dcp = self.plan_of(metadata), metadata.state.parallel
        if not (batch.common_prefix_len or dcp.dcp_size > 1):  # phases: separate rows, written in place
            for each in passes:
                found = self._attend(each, query, pages, rows[each.rows], metadata, self.layer.sinks)
                if lse is not None:
                    lse[each.rows] = found
            return
        first, second = passes  # two passes over the same rows, the sink in the first alone
        one = self._shard(first, query, pages, metadata) if first.is_sharded else self._partial(
            first, query, pages, metadata, self.layer.sinks
        )  # fmt: skip
        other = self._partial(second, query, (key, value) if first.is_sharded else pages, metadata, None)
        merged, total = merge_attention_states(*one, *other, sink_in_a=self.layer.sinks is not None)
        rows[first.rows] = merged
        if lse is not None:
            lse[first.rows] = total

    def _shard(self, each, query, pages, metadata):
        """Attend this rank's keys for the heads of all ranks, then keep this rank's heads of all keys."""
        group = metadata.state.parallel.dcp_group
        gathered = fa3.all_gather_heads(query[each.rows], group)
        out = torch.empty_like(gathered)
        return fa3.combine_over_ranks(out, self._attend(each, gathered, pages, out, metadata, None), group)

    def _partial(self, each, query, pages, metadata, sinks):
        out = torch.empty_like(query[each.rows])
        return out, self._attend(each, query, pages, out, metadata, sinks)

    def _attend(self, each, query, pages, out, metadata, sinks):
        shape = (each.seqused_k.shape[0], self.num_kv_heads)
        descales = {
            f"{letter}_descale": None if scale is None else scale.expand(shape)
            for letter, scale in zip(
                "qkv", (self.layer.q_scale_tensor, self.layer.k_scale_tensor, self.layer.v_scale_tensor), strict=True
            )
        }
        _, lse = fa3.flash_attn_varlen_func(
            query[each.rows], *pages, out=out, cu_seqlens_q=each.cu_seqlens_q, max_seqlen_q=each.max_seqlen_q,
            seqused_k=each.seqused_k, max_seqlen_k=each.max_seqlen_k, block_table=each.block_table, causal=each.causal,
            softmax_scale=self.scale, window_size=self.window, softcap=self.logits_soft_cap or 0.0, s_aux=sinks,
            scheduler_metadata=each.scheduler_metadata, num_splits=metadata.num_splits, **descales,
        )  # fmt: skip
        return lse.T

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        write_pages(key, kv_cache.k, slot_mapping, self.layer.k_scale_tensor)
        write_pages(value, kv_cache.v, slot_mapping, self.layer.v_scale_tensor)


class FlashAttentionBuilder(MetadataBuilder):
    supports_graphs = True

    def plan_batch(self, batch, split, *, fast, graph):
        plans = {}
        for key, (impl, *_) in self.plan_groups.items():
            passes = self._passes(split, graph)
            if not fast or graph is not None:  # a graph was captured with schedules, and keeps reading them
                passes = tuple(self._scheduled((key, number), impl, each, graph) for number, each in enumerate(passes))
            plans[key] = passes
        return {"plans": plans, "num_splits": self._num_splits(batch.num_actual_tokens)}

    def replan_block_table(self, metadata, batch, split):
        """Schedules follow from lengths alone, and are kept."""
        plans = {
            key: tuple(
                attrs.evolve(new, scheduler_metadata=old.scheduler_metadata)
                for new, old in zip(self._passes(split, None), metadata.plans[key], strict=True)
            )
            for key in self.plan_groups
        }
        return {"plans": plans, "num_splits": metadata.num_splits}

    def _passes(self, split, graph):
        batch = split.batch
        if self.parallel.dcp_size > 1:
            return self._sharded(batch, graph)
        if batch.common_prefix_len:
            return self._cascade(batch)
        return tuple(self._pass(phase, batch) for phase in (split.decodes, split.prefills) if phase is not None)

    def _pass(self, phase, batch):
        keys = {"seqused_k": phase.seq_lens, "max_seqlen_k": phase.max_seq_len}
        if batch.encoder_seq_lens is not None:
            keys = {"seqused_k": phase.encoder_seq_lens, "max_seqlen_k": batch.max_encoder_seq_len}
        return Pass(
            rows=phase.rows, cu_seqlens_q=phase.query_start_loc, max_seqlen_q=phase.max_query_len,
            block_table=phase.block_table, causal=batch.causal, **keys,
        )  # fmt: skip

    def _cascade(self, batch):
        length, count = batch.common_prefix_len, batch.num_actual_tokens
        prefix = torch.tensor([[0, count], [length, 0]], dtype=torch.int32)
        prefix, rows = upload(prefix, batch.seq_lens.device), slice(0, count)
        return (
            Pass(
                rows=rows, cu_seqlens_q=prefix[0], max_seqlen_q=count, seqused_k=prefix[1, :1], max_seqlen_k=length,
                block_table=batch.block_table[:1], causal=False,
            ),
            Pass(
                rows=rows, cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_query_len, causal=True,
                seqused_k=(batch.seq_lens - length).clamp(min=0), max_seqlen_k=batch.max_seq_len - length,
                block_table=batch.block_table[:, length // self.agreement.block_size :],
            ),
        )  # fmt: skip

    def _sharded(self, batch, graph):
        queries = batch.query_start_loc.diff() * (batch.seq_lens > 0)  # padding in a graph has rows, and no key
        ranks, queries = self.parallel, self.persist(graph, "queries", queries)
        where = (ranks.dcp_size, ranks.dcp_rank, ranks.dcp_interleave)
        context = num_local_tokens_per_dcp_rank(batch.seq_lens - batch.query_start_loc.diff(), *where)
        rest = {
            "rows": slice(0, batch.num_actual_tokens),
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
        }
        return (
            Pass(
                seqused_k=self.persist(graph, "context", context.clamp(min=0)),
                max_seqlen_k=max_local_tokens_per_dcp_rank(batch.max_seq_len, ranks.dcp_size, ranks.dcp_interleave),
                block_table=batch.block_table, causal=False, is_sharded=True, **rest,
            ),
            Pass(seqused_k=queries, max_seqlen_k=batch.max_query_len, block_table=None, causal=True, **rest),
        )  # fmt: skip

    def _scheduled(self, key, impl, each, graph):
        schedule = fa3.get_scheduler_metadata(
            batch_size=each.seqused_k.shape[0], max_seqlen_q=each.max_seqlen_q, max_seqlen_k=each.max_seqlen_k,
            num_heads_q=impl.num_q_heads * (self.parallel.dcp_size if each.is_sharded else 1),
            num_heads_kv=impl.num_kv_heads, headdim=impl.head_size, cache_seqlens=each.seqused_k,
            qkv_dtype=torch_dtype(self.agreement.kv_cache_dtype), cu_seqlens_q=each.cu_seqlens_q,
            page_size=self.agreement.block_size, causal=each.causal, window_size=impl.window,
            num_splits=self._num_splits(each.rows.stop),
        )  # fmt: skip
        if graph is None:
            return attrs.evolve(each, scheduler_metadata=schedule)
        count, size = schedule.shape[0], 1 + -(-self.limits.max_num_reqs // 4) * 4
        memory = self.per_graph(
            graph, ("schedule", key), lambda: torch.zeros(size, dtype=torch.int32, device=self.state.device)
        )
        memory[:count].copy_(schedule)
        memory[count - 1 :].zero_()  # stale entries make blocks of the grid overwrite the output
        return attrs.evolve(each, scheduler_metadata=memory[:count])

    def _num_splits(self, tokens):
        """0 is the library's choice; buffers of a graph are as large as the bound makes them."""
        if self.batch_invariant:
            return 1
        captured = self.limits.capture_sizes
        return (self.limits.max_num_splits or 0) if captured and tokens <= captured[-1] else 0


class FlashAttentionBackend(Backend):
    supports_max_num_splits = True
    impl_class = FlashAttentionImpl
    builder_class = FlashAttentionBuilder
    metadata_class = FlashAttentionMetadata
