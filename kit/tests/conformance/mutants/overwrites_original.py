"""Changes the block table of the original metadata."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def replan_block_table(self, metadata, batch, split):
        metadata.batch.block_table.copy_(batch.block_table)
        return super().replan_block_table(metadata, batch, split)
