"""Computes only as many requests as a warp has threads."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        batch = metadata.batch
        if batch.num_reqs > 32:
            output[batch.query_start_loc[32] : batch.num_actual_tokens] = 0
