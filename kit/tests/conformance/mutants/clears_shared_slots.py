"""Writes K/V in a layer that shares the cache of another one."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if self.layer.kv_sharing_target is not None:
            slots = metadata.batch.slot_mapping
            for pages in (kv_cache.k, kv_cache.v):
                used, size = slots[slots >= 0], pages.shape[1]
                pages[used // size, used % size] = 0
        super().run(query, key, value, kv_cache, metadata, output, lse)
