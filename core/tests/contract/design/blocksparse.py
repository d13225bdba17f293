"""A block-sparse backend, and a recording fake of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import AttentionImpl, Backend, Metadata, MetadataBuilder, State
from attnplug.errors import LimitsError
from attnplug.ops import write_pages

# --- the fake -------------------------------------------------------------------------------------------------------


class Kernels:
    """Records each call."""

    def __init__(self):
        self.prefills: list[dict[str, Any]] = []
        self.decodes: list[dict[str, Any]] = []

    def sparse_prefill(self, q, pages, **given):
        self.prefills.append({"q": q, "pages": pages, **given})
        given["out"].fill_(1)

    def sparse_decode(self, q, pages, **given):
        self.decodes.append({"q": q, "pages": pages, **given})
        given["out"].fill_(2)


kernels = Kernels()

# --- the sketch -----------------------------------------------------------------------------------------------------


@frozen
class Pattern:
    """Which sparse blocks a head of this rank attends."""

    block_size: int
    local_blocks: int
    vert_stride: int
    first_head: int
    head_sliding_step: int

    @classmethod
    def of(cls, impl, parallel):
        requested = dict(impl.layer.block_sparse)
        step = (
            0
            if requested.get("homo_head")
            else max(1, requested["vert_stride"] // (impl.num_q_heads * parallel.tp_size))
        )
        return cls(
            requested["block_size"],
            requested["local_blocks"],
            requested["vert_stride"],
            parallel.tp_rank * impl.num_q_heads,
            step,
        )

    def visited(self, seq_lens, num_q_heads, num_kv_heads, max_blocks):
        """``(num_reqs, num_kv_heads, max_blocks)``: the blocks that some head of a KV group attends in a decode."""
        columns = torch.arange(max_blocks, device=seq_lens.device)
        heads = torch.arange(self.first_head, self.first_head + num_q_heads, device=seq_lens.device).unsqueeze(1)
        vertical = (columns + heads * self.head_sliding_step + 1) % self.vert_stride == 0
        last = ((seq_lens - 1).clamp(min=0) // self.block_size).view(-1, 1, 1)
        attended = (vertical | (last - columns < self.local_blocks)) & (columns <= last)
        return attended.unflatten(1, (num_kv_heads, -1)).any(2)


@frozen(eq=False, kw_only=True)
class BlockSparseMetadata(Metadata):
    context_lens: Tensor | None = None


class BlockSparseImpl(AttentionImpl):
    cache_write = "either"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if self.forward_writes and key is not None:
            self.update_kv_cache(key, value, kv_cache, metadata.batch.slot_mapping)
        rows, plan = output.unflatten(1, (self.num_q_heads, self.head_size)), self.plan_of(metadata)
        decodes, prefills = metadata.decodes, metadata.prefills
        if decodes is not None:
            kernels.sparse_decode(
                query[decodes.rows], kv_cache, visited=plan["visited"], pattern=plan["pattern"], scale=self.scale,
                block_table=decodes.block_table, seq_lens=decodes.seq_lens, out=rows[decodes.rows],
            )  # fmt: skip
        if prefills is not None:
            kernels.sparse_prefill(
                query[prefills.rows], kv_cache, pattern=plan["pattern"], scale=self.scale,
                block_table=prefills.block_table, seq_lens=prefills.seq_lens, context_lens=metadata.context_lens,
                query_start_loc=prefills.query_start_loc, max_query_len=prefills.max_query_len, out=rows[prefills.rows],
            )  # fmt: skip

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        for rows, pages in ((key, kv_cache.k), (value, kv_cache.v)):
            write_pages(rows, pages, slot_mapping)


class BlockSparseBuilder(MetadataBuilder):
    supports_graphs = True

    def __init__(self, backend, impls, state):
        super().__init__(backend, impls, state)
        self._patterns = {key: Pattern.of(group[0], self.parallel) for key, group in self.plan_groups.items()}

    def plan_batch(self, batch, split, *, fast, graph):
        prefills, context = split.prefills, None
        if prefills is not None:  # a prefix hit or a chunk: queries start behind what is cached
            context = prefills.seq_lens - prefills.query_start_loc.diff()
        plans = {
            key: {"pattern": pattern, "visited": self._visited(key, pattern, split.decodes, graph)}
            for key, pattern in self._patterns.items()
        }
        return {"plans": plans, "context_lens": context}

    def _visited(self, key, pattern, decodes, graph):
        if decodes is None:
            return None
        requested = self.agreement.requirements
        blocks = -(-decodes.max_seq_len // pattern.block_size)
        found = pattern.visited(decodes.seq_lens, requested.num_q_heads, requested.num_kv_heads, blocks)
        return self.persist(graph, key, found)

    def can_capture(self, batch):
        return batch.max_query_len == 1


class BlockSparseState(State):
    """Refuses, where limits are given, what the pattern does not cover."""

    def __init__(self, backend, limits, device, parallel=None):
        super().__init__(backend, limits, device, parallel)
        most = dict(backend.agreement.requirements.block_sparse)["max_seqlen"]
        if limits.max_seq_len > most:
            raise LimitsError(
                f"max_seq_len={limits.max_seq_len} was given",
                f"the pattern covers {most} tokens",
                f"pass max_seq_len={most}, or select with a longer pattern",
            )


class BlockSparseBackend(Backend):
    impl_class = BlockSparseImpl
    builder_class = BlockSparseBuilder
    metadata_class = BlockSparseMetadata
    state_class = BlockSparseState
