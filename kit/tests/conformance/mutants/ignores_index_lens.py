"""Reads the entries behind those that are selected."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        super().run_sparse(query, key, kv_cache, metadata, indices, None, output, lse)
