"""Attends to later tokens of a chunk, in chunked prefill."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        lens = batch.query_start_loc.diff()
        if bool(((lens > 1) & (batch.seq_lens > lens)).any()):
            shape = evolve(shape, causal=False, window=(-1, -1))
        return super()._plan(key, shape, batch, graph)
