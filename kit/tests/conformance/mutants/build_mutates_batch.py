"""Changes the host's block table in place."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_batch(self, batch, split, *, fast, graph):
        if batch.block_table is not None:
            batch.block_table.clamp_(max=1000)
        return super().plan_batch(batch, split, fast=fast, graph=graph)
