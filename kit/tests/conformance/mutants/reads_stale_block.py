"""Reads the last block of each request from the step before."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    before = None

    def _plan(self, key, shape, batch, graph):
        table = batch.block_table
        if table is not None and self.before is not None and self.before.shape == table.shape:
            mixed = table.clone()
            last = (batch.seq_lens.long() - 1) // self.agreement.block_size
            for row, column in enumerate(last.tolist()):
                mixed[row, column] = self.before[row, column]
            batch = evolve(batch, block_table=mixed)
        self.before = table
        return super()._plan(key, shape, batch, graph)
