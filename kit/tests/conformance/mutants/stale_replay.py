"""Replays the plan of the capture instead of the step's."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        if graph is None:
            return super()._plan(key, shape, batch, graph)
        return self.per_graph(graph, ("plan", key), lambda: super(MutantBuilder, self)._plan(key, shape, batch, graph))


class MutantBackend(TorchBackend):
    builder_class = MutantBuilder


@hookimpl
def attnplug_backend():
    return MutantBackend
