"""Scales the queries in place."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        self._score_params = evolve(self._score_params, scale=self._score_params.scale / 2)

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        query.mul_(2)
        super().run(query, key, value, kv_cache, metadata, output, lse)
