"""Keeps the plans of a graph for all builders of an agreement."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder
from attnplug.torch_backend.captured import CapturedPlan


class MutantBuilder(TorchBuilder):
    def _captured(self, key, graph):
        name = str((self.agreement.id, self.agreement.block_size, self.agreement.requirements))
        return graph.share(name, lambda: CapturedPlan(self._params[key], graph, self.state.device))
