"""Clamps indices in the tensor of the engine, whose next layer reuses them."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        super().run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
        indices.clamp_(min=0)
