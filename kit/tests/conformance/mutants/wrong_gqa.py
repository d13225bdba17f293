"""Query head h reads KV head h % num_kv_heads."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        ratio, heads = self.num_queries_per_kv, self.num_kv_heads
        query = query.unflatten(1, (ratio, heads)).transpose(1, 2).flatten(1, 2)
        super().run(query, key, value, kv_cache, metadata, output, lse)
        rows = slice(metadata.batch.num_actual_tokens)
        swapped = output[rows].view(-1, heads, ratio, self.head_size_v).transpose(1, 2)
        output[rows] = swapped.reshape(output[rows].shape)
