"""Looks indices up in the block table, as if they were positions of the request."""

from __future__ import annotations

import torch

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        batch, size = metadata.batch, kv_cache.k.shape[1]
        requests = torch.arange(batch.num_reqs).repeat_interleave(batch.query_start_loc.diff())
        columns = indices[: len(requests)].clamp(min=0) // size
        table = batch.block_table[requests]
        blocks = table.gather(1, columns.clamp(max=table.shape[1] - 1).long())
        slots = blocks * size + indices[: len(requests)] % size
        indices = indices.clone()
        indices[: len(requests)] = slots.masked_fill(indices[: len(requests)] < 0, -1)
        super().run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
