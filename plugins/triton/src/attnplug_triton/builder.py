"""Plans the launches of each step, from bounds alone: lengths are read on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from attnplug.batching import check_local_shard, shared_prefix_blocks
from attnplug.contract import MetadataBuilder, upload
from attnplug.ops import Ranks, split_views
from attnplug_triton.launch import Plan, Requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract import AttentionImpl, Batch, BatchSplit, GraphBuffers, State
    from attnplug_triton.backend import TritonBackend


class TritonBuilder(MetadataBuilder):
    """
    Decides which kernels run, for all layers.

    Each kernel finds its requests by the query lengths on the device, in any order. So a graph of any batch is
    replayed with other lengths, and without a build but for masks and spans.
    """

    supports_graphs = True
    decodes_first = False
    backend: TritonBackend

    def __init__(self, backend: TritonBackend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        parallel, requested = self.parallel, self.agreement.requirements
        self._group = requested.gqa_ratio * requested.dcp_size
        self._shard = parallel.dcp_rank, parallel.dcp_size, parallel.dcp_interleave
        self._ranks = Ranks(parallel, state.device) if parallel.dcp_size > 1 else None

    @property
    def replays_without_build(self) -> bool:
        """Whether a replay reads nothing that a build writes: custom masks and spans come with each build."""
        requested = self.agreement.requirements
        return not (requested.custom_mask or requested.mm_prefix)

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return one plan for all layers."""
        del split, fast
        short = self.backend.short
        topk = self.agreement.requirements.topk
        if topk is not None:
            has_short, has_long = True, False
        elif graph is None:
            has_short, has_long = _kinds(batch, short)
        else:
            query_len = graph.key.query_len
            has_short = query_len is None or query_len <= short
            has_long = query_len is None or query_len > short
        longest = (
            batch.max_seq_len - batch.common_prefix_len
            if batch.encoder_seq_lens is None
            else batch.max_encoder_seq_len or 0
        )
        members, most_keys = (batch.num_reqs, longest) if topk is None else (batch.num_actual_tokens, topk)
        splits = 0
        if has_short:
            fixed = self.backend.fixed_splits(self.limits)
            splits = fixed or self.backend.splits(
                members, most_keys, self.limits.max_num_splits, _longest_span(batch) if graph is None else 0
            )
        if self._ranks is not None and self.agreement.requirements.seq_lens_cpu_kind == "exact":
            check_local_shard(batch, self.parallel, self.agreement.block_size or 1)
        prefix = batch.common_prefix_len
        plan = Plan(
            requests=self._after_prefix(batch) if prefix else None,
            prefix=self._prefix(batch) if prefix else None,
            short=short,
            row_tiles=-(-short * self._group // self.backend.decode_tiles.rows),
            part_rows=None if topk is not None else short,
            num_splits=splits,
            num_selections=0 if topk is None else members,
            num_tokens=batch.num_actual_tokens if has_long else 0,
            parts=self._parts(members * short, splits) if splits > 1 else None,
            shard=self._shard,
            ranks=self._ranks,
            in_order=self.batch_invariant,
            mask_starts=None if batch.custom_mask is None else self._mask_starts(batch, graph),
            mask_stride=0 if graph is None or batch.custom_mask is None else graph.max_seq_len,
            decode_tiles=self.backend.decode_tiles,
            prefill_tiles=self.backend.prefill_tiles,
        )
        return {"plans": dict.fromkeys(self.plan_groups, plan)}

    def _after_prefix(self, batch: Batch) -> Requests:
        """Return the requests with the keys after the shared prefix. Padded ones may have fewer than the prefix."""
        length, table = batch.common_prefix_len, cast("Tensor", batch.block_table)
        return Requests(
            batch.num_reqs,
            batch.query_start_loc,
            (batch.seq_lens - length).clamp_(min=0),
            table[:, length // (self.agreement.block_size or 1) :],
        )

    def _prefix(self, batch: Batch) -> Plan:
        """Return the launches of the shared prefix: one request. All keys precede all rows, and no mask is needed."""
        backend, tokens, length = self.backend, batch.num_actual_tokens, batch.common_prefix_len
        numbers = upload(torch.tensor([0, tokens, length], dtype=torch.int32), batch.seq_lens.device)
        blocks = shared_prefix_blocks(batch, self.agreement.block_size or 1)
        splits = backend.prefix_splits(tokens, length, self.limits.max_num_splits)
        return Plan(
            requests=Requests(1, numbers[:2], numbers[2:], blocks),
            # A constant of the kernels, so that it does not depend on the step.
            short=self.limits.max_num_tokens if splits else 0,
            row_tiles=-(-tokens * self._group // backend.prefix_tiles.rows),
            part_rows=None,
            num_splits=splits,
            num_selections=0,
            num_tokens=0 if splits else tokens,
            parts=self._parts(tokens, splits) if splits > 1 else None,
            shard=self._shard,
            ranks=None,
            in_order=False,
            mask_starts=None,
            mask_stride=0,
            decode_tiles=backend.prefix_tiles,
            prefill_tiles=backend.prefill_tiles,
        )

    def _mask_starts(self, batch: Batch, graph: GraphBuffers | None) -> Tensor:
        """Return where the custom mask of each request begins: behind the one before, in a graph equally far apart."""
        if graph is None:
            sizes = batch.query_start_loc.diff() * batch.seq_lens.long()
            return sizes.cumsum(0) - sizes
        size = (graph.key.query_len or 1) * graph.max_seq_len
        device = batch.seq_lens.device
        return self.per_graph(graph, "mask_starts", lambda: torch.arange(graph.key.num_reqs, device=device) * size)

    def _parts(self, rows: int, splits: int) -> tuple[Tensor, Tensor]:
        requested = self.agreement.requirements
        size_v = requested.head_size_v or requested.head_size
        heads = requested.num_q_heads * requested.dcp_size
        return split_views(self.state.workspace, rows, heads, splits, size_v)


def _longest_span(batch: Batch) -> int:
    """Return the tokens of the longest span after its first; 0 without spans, and without their CPU copy."""
    spans = batch.mm_prefix_range_cpu
    if spans is None or not spans.shape[0]:
        return 0
    return int((spans[:, 1] - spans[:, 0]).amax())


def _kinds(batch: Batch, short: int) -> tuple[bool, bool]:
    """Return whether requests have at most `short` new tokens, and whether some have more."""
    if batch.max_query_len <= short:
        return True, False
    starts = batch.query_start_loc_cpu
    if starts is None:
        return True, True
    return any(0 < length <= short for length in starts.diff().tolist()), True
