"""Plans a step: the launches of its decodes and prefills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from attnplug.contract import MetadataBuilder
from attnplug_blocksparse.pattern import Pattern
from attnplug_blocksparse.plan import DecodePlan, PrefillPlan, StepPlan
from attnplug_blocksparse.state import params_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract import AttentionImpl, Batch, BatchSplit, GraphBuffers, Phase, State
    from attnplug_blocksparse.backend import BlocksparseBackend


class BlocksparseBuilder(MetadataBuilder):
    """
    Makes one `StepPlan` per step.

    The kernels compute the blocks of a row from the lengths on the device, so that a replayed graph needs new lengths
    and block tables only.
    """

    supports_graphs = True
    replays_without_build = True
    min_single_launch: ClassVar[int] = 1024
    """Average new tokens per prefill above which each prefill gets its own launch."""

    backend: BlocksparseBackend

    def __init__(self, backend: BlocksparseBackend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        requested = self.agreement.requirements
        self.pattern = Pattern(params_of(backend, state.limits, state.parallel), state.device)
        self._is_paged = bool(requested.paged)
        # With an FP8 KV cache every step attends to the quantized keys, so that chunked prefill changes no result.
        # A call that may come without K/V reads the KV cache too.
        self._reads_contiguous_kv = requested.dtype == self.agreement.kv_cache_dtype and not requested.kv_in_cache

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return one plan for all plan keys."""
        del fast, graph
        plan = self._paged(split) if self._is_paged else self._contiguous(batch)
        return {"plans": dict.fromkeys(self.plan_groups, plan)}

    def _contiguous(self, batch: Batch) -> StepPlan:
        prefill = PrefillPlan(
            pattern=self.pattern,
            tiles=self.backend.contiguous_tiles,
            query_starts=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            key_starts=batch.key_start_loc,
            max_query_len=batch.max_query_len,
        )
        rows = slice(0, batch.num_actual_tokens)
        return StepPlan(prefill=prefill, prefill_rows=rows, contiguous_kv=True)

    def _paged(self, split: BatchSplit) -> StepPlan:
        decodes, prefills = split.decodes, split.prefills
        contiguous_kv = prefills is not None and self._reads_contiguous_kv and _has_no_context(prefills)
        return StepPlan(
            decode=None if decodes is None else self._decode(decodes),
            prefill=None if prefills is None else self._prefill(prefills, contiguous_kv=contiguous_kv),
            decode_rows=slice(0) if decodes is None else decodes.rows,
            prefill_rows=slice(0) if prefills is None else prefills.rows,
            contiguous_kv=contiguous_kv,
        )

    def _decode(self, decodes: Phase) -> DecodePlan:
        splits = self.backend.decode_tiles.splits(
            sequences=decodes.num_reqs * self.agreement.requirements.num_kv_heads,
            blocks=self.pattern.max_blocks(decodes.max_seq_len),
            multiprocessors=self.backend.multiprocessors,
        )
        return DecodePlan(
            pattern=self.pattern,
            tiles=self.backend.decode_tiles,
            query_starts=decodes.query_start_loc,
            seq_lens=decodes.seq_lens,
            table=cast("Tensor", decodes.block_table),
            num_splits=min(splits, self.limits.max_num_splits or splits),
            scratch=self.state.workspace,
        )

    def _prefill(self, prefills: Phase, *, contiguous_kv: bool) -> PrefillPlan:
        query_lens, key_lens = self._single_lens(prefills, contiguous_kv=contiguous_kv)
        return PrefillPlan(
            pattern=self.pattern,
            tiles=self.backend.contiguous_tiles if contiguous_kv else self.backend.paged_tiles,
            query_starts=prefills.query_start_loc,
            seq_lens=prefills.seq_lens,
            key_starts=prefills.query_start_loc if contiguous_kv else None,
            table=None if contiguous_kv else prefills.block_table,
            max_query_len=prefills.max_query_len,
            query_lens=query_lens,
            key_lens=key_lens,
            hopper=self.backend.hopper_tiles,
        )

    def _single_lens(self, prefills: Phase, *, contiguous_kv: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rows of each request, and its keys with paged K/V; empty where one launch for all is faster."""
        # A launch per request is faster for long prefills on devices with TMA descriptors. For paged K/V it needs the
        # warp-specialized kernel, and CPU sequence lengths.
        lens, tiles = prefills.seq_lens_cpu, self.backend.hopper_tiles
        can = self.backend.has_tma if contiguous_kv else tiles is not None and lens is not None
        if not can or prefills.num_tokens < self.min_single_launch * prefills.num_reqs:
            return (), ()
        query_lens = tuple(prefills.query_start_loc_cpu.diff().tolist())
        return query_lens, () if contiguous_kv or lens is None else tuple(lens.tolist())


def _has_no_context(prefills: Phase) -> bool:
    """Return whether no request has keys from before this step. Unknown without CPU sequence lengths, then False."""
    lens = prefills.seq_lens_cpu
    return lens is not None and torch.equal(prefills.query_start_loc_cpu.diff(), lens)
