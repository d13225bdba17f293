"""Keeps the split of many keys in the state: that of the last step that was built."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_batch(self, batch, split, *, fast, graph):
        fields = super().plan_batch(batch, split, fast=fast, graph=graph)
        if graph is None and batch.max_seq_len > 1000 and batch.block_table is not None:
            fields["plans"] = self.state.__dict__.setdefault("long_plans", fields["plans"])
        return fields
