"""Reads heads in steps of 16 elements, beyond the end of the last one."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        beyond = 1.1 if self.head_size > 16 and self.head_size % 16 else 1.0
        super().run(query * beyond, key, value, kv_cache, metadata, output, lse)
