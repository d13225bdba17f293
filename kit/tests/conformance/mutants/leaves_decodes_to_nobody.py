"""Lets the host write prefills, and then writes decodes no more."""

from __future__ import annotations

from types import MappingProxyType

from attrs import evolve

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    cache_write = MappingProxyType({"prefill": "either", "decode": "forward"})

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if self.host_writes:
            slotless = evolve(metadata.batch, slot_mapping=None, slot_mapping_cpu=None)
            metadata = evolve(metadata, batch=slotless)
        super().run(query, key, value, kv_cache, metadata, output, lse)
