"""Keeps the plans of a graph for all builders of a state, whatever their agreements."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder
from attnplug.torch_backend.captured import CapturedPlan


class MutantBuilder(TorchBuilder):
    def _captured(self, key, graph):
        return graph.share("plan", lambda: CapturedPlan(self._params[key], graph, self.state.device))
