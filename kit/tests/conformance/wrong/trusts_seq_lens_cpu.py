"""Assumes that CPU sequence lengths are exact."""

from __future__ import annotations

from attrs import evolve
from minimal.least import LeastImpl

from attnplug.contract import Backend, hookimpl


class MutantImpl(LeastImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        lengths = metadata.batch.seq_lens_cpu
        if lengths is not None:
            metadata = evolve(metadata, batch=evolve(metadata.batch, seq_lens=lengths))
        super().run(query, key, value, kv_cache, metadata, output, lse)


class MutantBackend(Backend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
