"""Ignores the custom mask of the batch."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        return super()._plan(key, shape, evolve(batch, custom_mask=None), graph)
