"""Multiplies values by weights of 0 where blocks before a window were freed: NaN in the null block stays NaN."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if kv_cache is None:
            return
        batch, size = metadata.batch, kv_cache.k.shape[1]
        for request in range(batch.num_reqs):
            length = int(batch.seq_lens[request])
            if (batch.block_table[request, : -(-length // size)] == 0).any():
                output += 0 * kv_cache.v[0].float().sum()
