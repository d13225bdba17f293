"""Advances the requests that had ended, too."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_next_step(self, metadata, batch, split):
        fields = super().plan_next_step(metadata, batch, split)
        if batch.num_actual_tokens < metadata.batch.num_actual_tokens:
            fields["plans"] = metadata.plans
        return fields
