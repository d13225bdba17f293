"""Reads -1, which is no token, as the last slot of the KV cache, as an index from the end."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        last = kv_cache.k.shape[0] * kv_cache.k.shape[1] - 1
        indices = indices.masked_fill(indices < 0, last)
        super().run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
