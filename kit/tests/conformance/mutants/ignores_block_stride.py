"""Assumes that blocks follow each other in memory, whatever else is between them."""

from __future__ import annotations

from types import SimpleNamespace

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if kv_cache is not None:
            kv_cache = SimpleNamespace(k=dense(kv_cache.k), v=dense(kv_cache.v))
        super().run(query, key, value, kv_cache, metadata, output, lse)


def dense(pages):
    (_, of_slot, of_head, _), (_, slots, heads, _) = pages.stride(), pages.shape
    return pages.as_strided(pages.shape, (max(slots * of_slot, heads * of_head), of_slot, of_head, 1))
