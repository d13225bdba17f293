"""Writes zeros where a call has no K/V."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        slots = metadata.batch.slot_mapping
        if key is None and slots is not None and not self.layer.kv_sharing_target:
            key = query.new_zeros(len(slots), self.num_kv_heads, self.head_size)
            value = query.new_zeros(len(slots), self.num_kv_heads, self.head_size_v)
        super().run(query, key, value, kv_cache, metadata, output, lse)
