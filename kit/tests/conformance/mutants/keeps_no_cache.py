"""Attends to the keys of the step without writing them into the cache."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def update_kv_cache(self, key, value, kv_cache, slot_mapping, **more):
        pass
