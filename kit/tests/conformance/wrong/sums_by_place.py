"""Sums the keys of a request in an order that depends on its position in the batch."""

from __future__ import annotations

from kit.tests.conformance.minimal.least import LeastImpl


class MutantImpl(LeastImpl):
    def _keys(self, request, length, *call):
        keys, values = super()._keys(request, length, *call)
        return (keys.flip(0), values.flip(0)) if request % 2 and self._sees_all(request, *call) else (keys, values)

    def _sees_all(self, request, _key, _value, _cache, batch):
        return int(batch.query_start_loc.diff()[request]) == 1
