"""Attends to all tokens of a decode in a batch of decodes alone, without causality."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        if 1 < batch.max_query_len <= self.agreement.requirements.decode_query_len:
            shape = evolve(shape, causal=False)
        return super()._plan(key, shape, batch, graph)
