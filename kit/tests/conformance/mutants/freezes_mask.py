"""Replays with the custom mask of the capture's first step."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def prepare_in_graph(self, metadata):
        batch, graph = metadata.batch, metadata.graph
        if batch.custom_mask is not None:
            mask = self.per_graph(graph, "mask", batch.custom_mask.clone)
            metadata = evolve(metadata, batch=evolve(batch, custom_mask=mask))
        super().prepare_in_graph(metadata)
