"""Writes the slots of the next step into the metadata of this one."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_next_step(self, metadata, batch, split):
        metadata.batch.slot_mapping.copy_(batch.slot_mapping)
        return super().plan_next_step(metadata, batch, split)
