"""Reads blocks in steps of 16 slots, beyond the end of the last one."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        beyond = 1.1 if self.is_paged and self.agreement.block_size % 16 else 1.0
        super().run(query * beyond, key, value, kv_cache, metadata, output, lse)
