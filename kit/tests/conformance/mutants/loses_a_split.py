"""Ignores the last split of many keys."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if metadata.batch.max_seq_len > 1024 and metadata.graph is None:
            output[: metadata.batch.num_actual_tokens] *= 0.9
