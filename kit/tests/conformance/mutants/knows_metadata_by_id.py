"""Keeps the plan of metadata by their address."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        kept = self.__dict__.setdefault("kept", {})
        if metadata.graph is None:
            metadata = evolve(metadata, plans=kept.setdefault(id(metadata), metadata.plans))
        super().run(query, key, value, kv_cache, metadata, output, lse)
