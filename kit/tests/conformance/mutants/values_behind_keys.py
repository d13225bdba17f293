"""Finds the values one half of the memory behind the keys."""

from __future__ import annotations

from types import SimpleNamespace

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if kv_cache is not None:
            kv_cache = SimpleNamespace(k=kv_cache.k, v=behind(kv_cache.k))
        super().run(query, key, value, kv_cache, metadata, output, lse)


def behind(keys):
    half = keys.untyped_storage().nbytes() // keys.itemsize // 2
    return keys.as_strided(keys.shape, keys.stride(), keys.storage_offset() + half)
