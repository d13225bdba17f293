"""
Decode context parallelism: the cached tokens of each sequence are spread over ranks that share its KV heads.

Each rank has query heads of its own, the same KV heads as the others, and pages for its share of the tokens (`shares`).
Two passes over the same rows: the cached tokens, which this rank attends for the query heads of all ranks and as far as
it holds them, and the new tokens, which come with the call and which each rank attends for its own heads. A key of the
first pass lies before all of the rows whatever its place among the rank's keys, so that no mask is needed there; it is
also why windows, chunks and ALiBi cannot be served. The sink is in the second pass alone: in the first each rank would
count it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.batching import max_local_tokens_per_dcp_rank
from attnplug.contract import torch_dtype
from attnplug.ops import merge_attention_states, quantize
from attnplug_flash_attn.dcp_shards import check_local_shard, local_lens
from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall

if TYPE_CHECKING:
    from typing import Protocol

    from attnplug.contract import AttentionImpl, Batch, GraphBuffers, MetadataBuilder
    from attnplug_flash_attn.collectives import Ranks

    class Run(Protocol):
        """Attends the keys of a call: `Kernels.attend`, or what packs pages first."""

        def __call__(  # noqa: D102
            self,
            query: Tensor,
            key: Any,
            value: Any,
            out: Tensor,
            call: VarlenCall,
            params: LayerParams,
            lse: Tensor | None,
        ) -> None: ...


@frozen(eq=False, kw_only=True)
class DcpPlan:
    """
    The passes of a step whose sequences are spread over ranks.

    Attributes:
        num_tokens: Rows of the step, from the first one on.
        new: Of the new tokens.
        context: Of the cached tokens that this rank holds; None where it holds none.
        has_context: Whether any rank holds some. All ranks know it alike, and exchange then, also those that hold none.
        ranks: Who they are.
        in_order: Whether sums over ranks may not depend on what else is in the step.
        beyond: ``(num_tokens,)`` bool, in a graph: which rows belong to no request. Kernels that load keys tile by tile
            read the values there with the weight 0, and 0 * NaN is NaN. None elsewhere: there are no such rows.
    """

    num_tokens: int
    new: VarlenCall
    context: VarlenCall | None
    has_context: bool
    ranks: Ranks
    in_order: bool
    is_padding: Tensor | None = None

    def values(self, value: Tensor) -> Tensor:
        """Return the values of the new tokens, with zeros in rows that belong to no request."""
        if self.is_padding is None:
            return value
        return value[: self.num_tokens].masked_fill(self.is_padding.view(-1, 1, 1), 0.0)


def passes(
    builder: MetadataBuilder, batch: Batch, ranks: Ranks, *, num_splits: int, graph: GraphBuffers | None
) -> DcpPlan:
    """
    Return the passes of a batch, without schedules. Nothing waits for the device.

    Args:
        builder: Whose ranks, agreement and slots they are.
        batch: A checked batch.
        ranks: Of the builder's `Parallel`; made once.
        num_splits: `Call.num_splits` of both passes.
        graph: The graph that is built into; None runs eagerly.

    Raises:
        BatchError: The host counts another share for this rank than `Parallel` says.
        CacheError: A token has a slot that is not its place on this rank.
    """
    new = VarlenCall(
        cu_seqlens_q=batch.query_start_loc,
        cu_seqlens_k=batch.query_start_loc,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_query_len,
        causal=batch.causal,
        num_splits=num_splits,
    )
    cached, held = _counted(builder, batch)
    is_known = held is not None and graph is None  # what a graph runs serves all lengths to come
    longest = int(held.amax()) if held is not None and is_known else _bound(builder, batch)
    return DcpPlan(
        num_tokens=batch.num_actual_tokens,
        new=new,
        context=_context(builder, batch, new, longest, graph) if longest else None,
        has_context=not is_known or cached > 0,
        ranks=ranks,
        in_order=builder.batch_invariant,
        is_padding=None if graph is None else builder.persist(graph, "is_padding", _is_padding(batch)),
    )


def _is_padding(batch: Batch) -> Tensor:
    starts = batch.query_start_loc
    return torch.arange(batch.num_actual_tokens, dtype=torch.int32, device=starts.device) >= starts[-1]


def _counted(builder: MetadataBuilder, batch: Batch) -> tuple[int, Tensor | None]:
    """Return the most cached tokens of a request, and what this rank holds of each request's; None if not known."""
    lens, starts = batch.seq_lens_cpu, batch.query_start_loc_cpu
    if builder.agreement.requirements.seq_lens_cpu_kind != "exact" or lens is None or starts is None:
        return 0, None
    check_local_shard(batch, builder.parallel, builder.agreement.block_size or 1)
    cached = (lens - starts.diff()).clamp_(min=0)
    return int(cached.amax()), local_lens(cached, builder.parallel)


def _bound(builder: MetadataBuilder, batch: Batch) -> int:
    """Return at least what this rank holds of any request."""
    parallel, table = builder.parallel, batch.block_table
    assert table is not None  # noqa: S101 - sequences that are spread are paged
    bound = max_local_tokens_per_dcp_rank(batch.max_seq_len, parallel.dcp_size, parallel.dcp_interleave)
    return min(bound, table.shape[1] * (builder.agreement.block_size or 1))


def _context(
    builder: MetadataBuilder, batch: Batch, new: VarlenCall, longest: int, graph: GraphBuffers | None
) -> VarlenCall:
    cached = (batch.seq_lens - batch.query_start_loc.diff()).clamp_(min=0)
    return evolve(
        new,
        cu_seqlens_k=None,
        seqused_k=builder.persist(graph, "context", local_lens(cached, builder.parallel)),
        max_seqlen_k=longest,
        block_table=batch.block_table,
        causal=False,
    )


def attend(
    plan: DcpPlan,
    query: Tensor,
    new: tuple[Tensor, Tensor],
    pages: tuple[Any, Any],
    output: Tensor,
    lse: Tensor | None,
    *,
    run: Run,
    params: LayerParams,
) -> None:
    """
    Attend, and write the result of this rank's query heads into the first rows of `output` and `lse`.

    Args:
        plan: Of the step; all ranks have the same but for their shares.
        query: ``(tokens, q_heads, head_size)``: this rank's heads.
        new: K/V of the new tokens, ``(tokens, kv_heads, size)``, as the cache would give them back.
        pages: K/V of this rank's share, as `run` takes them.
        output: ``(tokens, q_heads, head_size_v)``.
        lse: ``(tokens, q_heads)`` float32, or None.
        run: Attends the keys of one call.
        params: The layer's.
    """
    rows = slice(plan.num_tokens)
    query, output, lse = query[rows], output[rows], None if lse is None else lse[rows]
    key, value = (each[rows] for each in new)
    if not plan.has_context:
        run(query, key, value, output, plan.new, params, lse)
        return
    out, sums = torch.empty_like(output), _empty_lse(query)
    run(query, key, value, out, plan.new, params, sums)
    cached = _attend_context(plan, query, pages, out, key.shape[1], run, params)
    merged, total = merge_attention_states(*cached, out, sums, sink_in_b=params.sinks is not None)
    output.copy_(merged)
    if lse is not None:
        lse.copy_(total)


def _attend_context(
    plan: DcpPlan, query: Tensor, pages: tuple[Any, Any], like: Tensor, kv_heads: int, run: Run, params: LayerParams
) -> tuple[Tensor, Tensor]:
    """Return this rank's heads over the cached tokens of all ranks: float32, and its LSE."""
    every = gather_heads(plan.ranks.all_gather(query), kv_heads)
    out, sums = like.new_empty((*every.shape[:2], like.shape[2])), _empty_lse(every)
    if plan.context is None:
        sums.fill_(-torch.inf)
    else:
        run(every, *pages, out, plan.context, params if params.sinks is None else evolve(params, sinks=None), sums)
    return combine(out, sums, plan.ranks, kv_heads, in_order=plan.in_order)


def combine(out: Tensor, lse: Tensor, ranks: Ranks, kv_heads: int, *, in_order: bool) -> tuple[Tensor, Tensor]:
    """
    Return the attention of this rank's heads over the keys of all ranks, float32, and its LSE.

    Args:
        out: ``(tokens, all q_heads, head_size_v)`` over the keys of this rank; anything where there are none.
        lse: ``(tokens, all q_heads)`` float32, -inf where this rank has no keys.
        ranks: Who they are.
        kv_heads: KV heads, by which the query heads are ordered (`together`).
        in_order: As of `Ranks.reduce_scatter`.
    """
    total = ranks.all_gather(lse).logsumexp(0)
    weight = (lse - total.masked_fill(total == -torch.inf, 0.0)).exp().unsqueeze(-1)
    # Where there are no keys out may be anything, NaN included, and 0 * NaN is NaN: it is replaced, not scaled.
    share = torch.where(weight > 0, out * weight, 0.0)
    mine = ranks.reduce_scatter(split_heads(share, ranks.size, kv_heads).contiguous(), in_order=in_order)
    return mine, split_heads(total, ranks.size, kv_heads)[ranks.rank]


def gather_heads(heads: Tensor, kv_heads: int) -> Tensor:
    """
    Return the query heads of all ranks in the order in which they read KV heads: ``(tokens, ranks * q_heads, ...)``.

    Args:
        heads: ``(ranks, tokens, q_heads, ...)``.
        kv_heads: KV heads; those of one follow each other.
    """
    size, tokens, count, *rest = heads.shape
    grouped = heads.view(size, tokens, kv_heads, count // kv_heads, *rest)
    return grouped.movedim(0, 2).reshape(tokens, size * count, *rest)


def split_heads(heads: Tensor, size: int, kv_heads: int) -> Tensor:
    """Return what `together` has put together, by rank again: ``(size, tokens, q_heads, ...)``."""
    tokens, count, *rest = heads.shape
    grouped = heads.view(tokens, kv_heads, size, count // (kv_heads * size), *rest)
    return grouped.movedim(2, 0).reshape(size, tokens, count // size, *rest)


def as_cached(impl: AttentionImpl, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return new K/V as the cache of a layer holds them: kernels take queries, cached and new keys of one dtype."""
    dtype = torch_dtype(impl.agreement.kv_cache_dtype)
    if dtype == key.dtype:
        return key, value
    return quantize(key, dtype, impl.layer.k_scale_tensor), quantize(value, dtype, impl.layer.v_scale_tensor)


def _empty_lse(query: Tensor) -> Tensor:
    return torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
