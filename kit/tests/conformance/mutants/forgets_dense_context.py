"""Attends to the keys of this step only, where all keys come with the call."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        batch = metadata.batch
        if not self.is_paged and batch.max_seq_len > batch.max_query_len:
            output[: batch.num_actual_tokens] *= 1.1
