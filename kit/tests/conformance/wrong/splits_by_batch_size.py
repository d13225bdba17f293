"""Splits the keys of long sequences depending on the number of requests."""

from __future__ import annotations

from kit.tests.conformance.minimal.least import LeastImpl


class MutantImpl(LeastImpl):
    def _keys(self, request, length, key, value, kv_cache, batch):
        keys, values = super()._keys(request, length, key, value, kv_cache, batch)
        is_split = length > 512 and batch.num_reqs < 16 and int(batch.query_start_loc.diff()[request]) == 1
        return (keys.flip(0), values.flip(0)) if is_split else (keys, values)
