"""Identifies a batch by the address of its block table."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def __init__(self, backend, impls, state):
        super().__init__(backend, impls, state)
        self._known = {}

    def _plan(self, key, shape, batch, graph):
        if graph is not None or batch.block_table is None:
            return super()._plan(key, shape, batch, graph)
        place = (key, batch.block_table.data_ptr(), *batch.seq_lens.tolist())
        if place not in self._known:
            table = batch.block_table.clone()
            batch = evolve(batch, block_table=table, block_table_cpu=table)
            self._known[place] = super()._plan(key, shape, batch, graph)
        return self._known[place]
