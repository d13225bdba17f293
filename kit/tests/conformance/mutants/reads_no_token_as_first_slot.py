"""Reads -1, which is no token, as slot 0 of the null block."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        indices = indices.clamp(min=0)
        super().run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
