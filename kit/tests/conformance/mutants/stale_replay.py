"""Prepares a graph once, and replays the step of the capture."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def prepare_in_graph(self, metadata):
        self.per_graph(metadata.graph, "prepared", lambda: super(MutantBuilder, self).prepare_in_graph(metadata) or 1)
