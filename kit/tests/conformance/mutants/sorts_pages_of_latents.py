"""Reads the pages of latents in the order of their numbers."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        if graph is None and self.agreement.requirements.latent:
            table = batch.block_table.sort(1).values
            batch = evolve(batch, block_table=table, block_table_cpu=table)
        return super()._plan(key, shape, batch, graph)
