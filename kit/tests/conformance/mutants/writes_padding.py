"""Writes padding rows into the null block."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def update_kv_cache(self, key, value, kv_cache, slot_mapping, **more):
        super().update_kv_cache(key, value, kv_cache, slot_mapping.clamp(min=0), **more)
