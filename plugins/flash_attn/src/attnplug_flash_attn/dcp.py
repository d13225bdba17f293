"""
Decode context parallelism (DCP): the cached tokens of each sequence are distributed over ranks with the same KV heads.

Each rank has its own query heads, and pages for its shard of the tokens (`attnplug.batching.dcp`). Two passes run over
the same rows. The context pass attends to the cached tokens of this rank, for the query heads of all ranks. The other
pass attends to the new tokens, with the K/V of the call, for this rank's query heads. All keys of the context pass
precede all rows, so that it needs no mask. Their positions are not known to the kernels, which excludes windows, chunks
and ALiBi. The sink is in the pass over new tokens only, since each rank would count it in the context pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.batching import check_local_shard, local_lens, max_local_tokens_per_dcp_rank, num_unpadded_tokens
from attnplug.contract import torch_dtype
from attnplug.ops import combine, gather_heads, merge_into, quantize
from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall

if TYPE_CHECKING:
    from typing import Protocol

    from attnplug.contract import AttentionImpl, Batch, GraphBuffers, MetadataBuilder
    from attnplug.ops import Ranks

    class Run(Protocol):
        """Attends to the keys of a call: `Kernels.attend`, or a method that packs pages first."""

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
    The passes of a step with decode context parallelism.

    Attributes:
        num_tokens: The rows of the step, which are the first ones.
        new: The pass over the new tokens.
        context: The pass over this rank's cached tokens; None if it has none.
        has_context: Whether any rank has cached tokens. It is equal on all ranks, since all communicate then.
        ranks: The ranks.
        in_order: Whether sums over ranks may not depend on the rest of the batch.
        is_padding: ``(num_tokens,)`` bool in a graph: the rows of padding. Kernels that load whole tiles multiply the
            values there by 0, and 0 * NaN is NaN. None in eager steps, which have no such rows.
    """

    num_tokens: int
    new: VarlenCall
    context: VarlenCall | None
    has_context: bool
    ranks: Ranks
    in_order: bool
    is_padding: Tensor | None = None

    def values(self, value: Tensor) -> Tensor:
        """Return the values of the new tokens, with zeros in padding rows."""
        if self.is_padding is None:
            return value
        return value[: self.num_tokens].masked_fill(self.is_padding.view(-1, 1, 1), 0.0)


def passes(
    builder: MetadataBuilder, batch: Batch, ranks: Ranks, *, num_splits: int, graph: GraphBuffers | None
) -> DcpPlan:
    """
    Return the passes of a batch, without schedules and without synchronization.

    Args:
        builder: The builder of the step.
        batch: A checked batch.
        ranks: The ranks of the builder's `Parallel`.
        num_splits: `VarlenCall.num_splits` of both passes.
        graph: The graph of the build; None for eager steps.

    Raises:
        BatchError: The batch's local lengths differ from those of `Parallel`.
        CacheError: A token has another slot than on this rank.
    """
    starts, is_padding = batch.query_start_loc, None
    if graph is not None:  # padding has rows there, and no keys
        used = num_unpadded_tokens(starts, batch.seq_lens)
        rows = torch.arange(batch.num_actual_tokens, dtype=torch.int32, device=starts.device)
        is_padding = builder.persist(graph, "is_padding", rows >= used)
        starts = builder.persist(graph, "cu_seqlens_k", starts.minimum(used))
    new = VarlenCall(
        cu_seqlens_q=batch.query_start_loc,
        cu_seqlens_k=starts,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_query_len,
        causal=batch.causal,
        num_splits=num_splits,
    )
    cached, local = _context_lens(builder, batch)
    is_known = local is not None and graph is None  # a graph is captured for all later lengths
    longest = int(local.amax()) if local is not None and is_known else _max_local_len(builder, batch)
    return DcpPlan(
        num_tokens=batch.num_actual_tokens,
        new=new,
        context=_context(builder, batch, new, longest, graph) if longest else None,
        has_context=not is_known or cached > 0,
        ranks=ranks,
        in_order=builder.batch_invariant,
        is_padding=is_padding,
    )


def _context_lens(builder: MetadataBuilder, batch: Batch) -> tuple[int, Tensor | None]:
    """Return the maximum number of cached tokens, and this rank's number per request; None if not known on the CPU."""
    lens, starts = batch.seq_lens_cpu, batch.query_start_loc_cpu
    if builder.agreement.requirements.seq_lens_cpu_kind != "exact" or lens is None or starts is None:
        return 0, None
    check_local_shard(batch, builder.parallel, builder.agreement.block_size or 1)
    cached = (lens - starts.diff()).clamp_(min=0)
    return int(cached.amax()), local_lens(cached, builder.parallel)


def _max_local_len(builder: MetadataBuilder, batch: Batch) -> int:
    """Return an upper bound of this rank's tokens of a request."""
    parallel, table = builder.parallel, batch.block_table
    assert table is not None  # noqa: S101 - DCP requires pages
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
    Attend, and write the result for this rank's query heads into the first rows of `output` and `lse`.

    Args:
        plan: The passes of the step. They differ between ranks in the cached tokens only.
        query: ``(tokens, q_heads, head_size)``, this rank's heads.
        new: K/V of the new tokens, ``(tokens, kv_heads, size)``, in the dtype of the KV cache.
        pages: K/V of this rank's cached tokens, in the form that `run` reads.
        output: ``(tokens, q_heads, head_size_v)``.
        lse: ``(tokens, q_heads)`` float32, or None.
        run: Attends to the keys of one call.
        params: The parameters of the layer.
    """
    rows = slice(plan.num_tokens)
    query, output, lse = query[rows], output[rows], None if lse is None else lse[rows]
    key, value = (each[rows] for each in new)
    if not plan.has_context:
        run(query, key, value, output, plan.new, params, lse)
        return
    sums = _empty_lse(query) if lse is None else lse
    run(query, key, value, output, plan.new, params, sums)
    merge_into(output, sums, *_attend_context(plan, query, pages, output, key.shape[1], run, params))


def _attend_context(
    plan: DcpPlan, query: Tensor, pages: tuple[Any, Any], like: Tensor, kv_heads: int, run: Run, params: LayerParams
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of this rank's heads over the cached tokens of all ranks."""
    all_heads = gather_heads(plan.ranks.all_gather(query), kv_heads)
    out, sums = like.new_empty((*all_heads.shape[:2], like.shape[2])), _empty_lse(all_heads)
    if plan.context is None:
        sums.fill_(-torch.inf)
    else:
        run(all_heads, *pages, out, plan.context, params if params.sinks is None else evolve(params, sinks=None), sums)
    return combine(out, sums, plan.ranks, kv_heads, in_order=plan.in_order)


def as_cached(impl: AttentionImpl, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return new K/V in the dtype of the KV cache, since kernels take queries and all keys in one dtype."""
    dtype = torch_dtype(impl.agreement.kv_cache_dtype)
    if dtype == key.dtype:
        return key, value
    return quantize(key, dtype, impl.layer.k_scale_tensor), quantize(value, dtype, impl.layer.v_scale_tensor)


def _empty_lse(query: Tensor) -> Tensor:
    return torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
