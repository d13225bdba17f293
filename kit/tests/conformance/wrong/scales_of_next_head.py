"""Multiplies keys by the scales of another head."""

from __future__ import annotations

from attrs import evolve

from kit.tests.conformance.minimal.least import LeastImpl


class MutantImpl(LeastImpl):
    def _keys(self, request, length, key, value, kv_cache, batch):
        if self.scaled:
            kv_cache = evolve(kv_cache, tensors={**kv_cache.tensors, "k_scale": kv_cache["k_scale"].roll(1, 1)})
        return super()._keys(request, length, key, value, kv_cache, batch)
