"""Attends to the keys of the first split only, if the split-KV limit is 1."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        if self.limits.max_num_splits == 1:
            shape = evolve(shape, window=(255, 0))
        return super()._plan(key, shape, batch, graph)
