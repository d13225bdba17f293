"""Gathers pages once per step, from the cache of the first layer."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if kv_cache is not None and metadata.graph is None:
            kv_cache = metadata.batch.cached("pages", lambda: kv_cache)
        super().run(query, key, value, kv_cache, metadata, output, lse)
