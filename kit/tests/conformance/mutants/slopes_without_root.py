"""Computes linear ALiBi where sqrt was requested."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        shape = evolve(shape, alibi=shape.alibi and "linear")
        return super()._plan(key, shape, batch, graph)
