"""Decodes the first token after a prompt with the plan of the prompt."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_next_step(self, metadata, batch, split):
        fields = super().plan_next_step(metadata, batch, split)
        return {"plans": metadata.plans} if metadata.num_prefills else fields
