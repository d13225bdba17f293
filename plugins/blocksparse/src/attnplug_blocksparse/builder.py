"""Turns a batch into a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from attnplug.contract import MetadataBuilder
from attnplug_blocksparse.decode import Tokens
from attnplug_blocksparse.pattern import Pattern
from attnplug_blocksparse.plan import Plan
from attnplug_blocksparse.prefill import Prompts
from attnplug_blocksparse.state import params_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract import AttentionImpl, Batch, BatchSplit, GraphBuffers, Phase, State
    from attnplug_blocksparse.backend import BlocksparseBackend


class BlocksparseBuilder(MetadataBuilder):
    """
    Makes one `Plan` per step. Which blocks a row attends the kernels find by themselves, from the lengths on the
    device: a replayed graph needs nothing new but those.
    """

    supports_graphs = True
    worth_a_launch: ClassVar[int] = 1024
    """Tokens per prompt, on average, from which on each is a launch of its own."""

    backend: BlocksparseBackend

    def __init__(self, backend: BlocksparseBackend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        asked = self.agreement.requirements
        self.pattern = Pattern(params_of(backend, state.limits, state.parallel), state.device)
        self._is_paged = bool(asked.paged)
        # What an 8-bit cache makes of keys is attended in every step, the first one included.
        self._uses_rows = asked.dtype == self.agreement.kv_cache_dtype

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Make one plan for all plan keys."""
        del fast, graph
        plan = self._paged(split) if self._is_paged else self._dense(batch)
        return {"plans": dict.fromkeys(self.plan_groups, plan)}

    def _dense(self, batch: Batch) -> Plan:
        prompts = Prompts(
            pattern=self.pattern,
            tiles=self.backend.row_tiles,
            query_starts=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            key_starts=batch.key_start_loc,
            longest_query=batch.max_query_len,
        )
        rows = slice(0, batch.num_actual_tokens)
        return Plan(prompts=prompts, prompt_rows=rows, reads_rows=True)

    def _paged(self, split: BatchSplit) -> Plan:
        decodes, prefills = split.decodes, split.prefills
        tokens = None if decodes is None else self._tokens(decodes)
        reads_rows = prefills is not None and self._uses_rows and _is_whole(prefills)
        return Plan(
            tokens=tokens,
            prompts=None if prefills is None else self._prompts(prefills, reads_rows=reads_rows),
            decode_rows=slice(0) if decodes is None else decodes.rows,
            prompt_rows=slice(0) if prefills is None else prefills.rows,
            reads_rows=reads_rows,
        )

    def _tokens(self, decodes: Phase) -> Tokens:
        splits = self.backend.decode_tiles.splits(
            sequences=decodes.num_reqs * self.agreement.requirements.num_kv_heads,
            blocks=self.pattern.most_blocks(decodes.max_seq_len),
            multiprocessors=self.backend.multiprocessors,
        )
        return Tokens(
            pattern=self.pattern,
            tiles=self.backend.decode_tiles,
            query_starts=decodes.query_start_loc,
            seq_lens=decodes.seq_lens,
            table=cast("Tensor", decodes.block_table),
            num_splits=min(splits, self.limits.max_num_splits or splits),
            scratch=self.state.workspace,
        )

    def _prompts(self, prefills: Phase, *, reads_rows: bool) -> Prompts:
        lengths, key_lengths = self._lengths(prefills, reads_rows=reads_rows)
        return Prompts(
            pattern=self.pattern,
            tiles=self.backend.row_tiles if reads_rows else self.backend.page_tiles,
            query_starts=prefills.query_start_loc,
            seq_lens=prefills.seq_lens,
            key_starts=prefills.query_start_loc if reads_rows else None,
            table=None if reads_rows else prefills.block_table,
            longest_query=prefills.max_query_len,
            lengths=lengths,
            key_lengths=key_lengths,
            hopper=self.backend.hopper_tiles,
        )

    def _lengths(self, prefills: Phase, *, reads_rows: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """
        Rows of each request, and its keys where they are in pages; nothing where one launch for all is better.

        One launch each pays where prompts are long, and where the device loads tiles by descriptors, of pages by warps
        with roles; and how many keys there are the host has to know.
        """
        lens, tiles = prefills.seq_lens_cpu, self.backend.hopper_tiles
        can = self.backend.has_descriptors if reads_rows else tiles is not None and lens is not None
        if not can or prefills.num_tokens < self.worth_a_launch * prefills.num_reqs:
            return (), ()
        lengths = tuple(prefills.query_start_loc_cpu.diff().tolist())
        return lengths, () if reads_rows or lens is None else tuple(lens.tolist())


def _is_whole(prefills: Phase) -> bool:
    """Whether all prompts come in one piece: no request has keys from before this step."""
    lens = prefills.seq_lens_cpu
    return lens is not None and torch.equal(prefills.query_start_loc_cpu.diff(), lens)
