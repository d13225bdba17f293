"""Uses the plan of the step before."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    before = None

    def _plan(self, key, shape, batch, graph):
        plan, self.before = self.before, super()._plan(key, shape, batch, graph)
        return plan or self.before
