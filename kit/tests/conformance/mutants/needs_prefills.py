"""Skips the last decode of a batch without prefills."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if not metadata.num_prefills:
            output[metadata.batch.num_actual_tokens - 1] = 0
