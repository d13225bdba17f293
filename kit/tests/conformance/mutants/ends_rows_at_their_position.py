"""Masks a row of indices as if they were all keys of the request, of which the query is the last."""

from __future__ import annotations

import torch

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        batch = metadata.batch
        queries = batch.query_start_loc.diff()
        first = (batch.seq_lens - queries).repeat_interleave(queries)
        start = batch.query_start_loc[:-1].repeat_interleave(queries)
        positions = first - start + torch.arange(len(first), device=first.device)
        indices = indices.clone()
        columns = torch.arange(indices.shape[1], device=first.device)
        indices[: len(first)].masked_fill_(columns > positions[:, None], -1)
        super().run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
