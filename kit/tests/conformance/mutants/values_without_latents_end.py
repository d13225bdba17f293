"""Takes the elements around the end of a latent for its value: those before the end of the key."""

from __future__ import annotations

from types import SimpleNamespace

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if kv_cache is not None and self.agreement.requirements.latent:
            size = self.head_size - self.head_size_v
            query, key = (None if one is None else one.roll(-size, -1) for one in (query, key))
            kv_cache = SimpleNamespace(k=kv_cache.k.roll(-size, -1), v=kv_cache.v)
        super().run(query, key, value, kv_cache, metadata, output, lse)
