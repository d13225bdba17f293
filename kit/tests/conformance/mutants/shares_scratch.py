"""Computes in memory that threads share."""

from __future__ import annotations

from time import sleep

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        MutantImpl.scratch = output.clone()
        sleep(0.02)
        output.copy_(MutantImpl.scratch if MutantImpl.scratch.shape == output.shape else output * 0)
