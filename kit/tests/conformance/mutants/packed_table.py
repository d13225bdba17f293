"""Assumes a contiguous block table."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        table = batch.block_table
        if table is not None and graph is None:
            packed = table.as_strided(table.shape, (max(-(-batch.max_seq_len // self.agreement.block_size), 1), 1))
            batch = evolve(batch, block_table=packed, block_table_cpu=packed)
        return super()._plan(key, shape, batch, graph)
