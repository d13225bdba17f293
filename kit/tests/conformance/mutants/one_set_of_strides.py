"""Reads and writes keys with the strides of values, which a library does that takes one set for both."""

from __future__ import annotations

from types import SimpleNamespace

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if kv_cache is not None and kv_cache.k.shape == kv_cache.v.shape:
            kv_cache = SimpleNamespace(k=kv_cache.k.as_strided(kv_cache.k.shape, kv_cache.v.stride()), v=kv_cache.v)
        super().run(query, key, value, kv_cache, metadata, output, lse)
