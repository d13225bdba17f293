"""Attends to one token more than the window has."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        left, right = shape.window
        return super()._plan(key, evolve(shape, window=(left + 1 if left >= 0 else left, right)), batch, graph)
