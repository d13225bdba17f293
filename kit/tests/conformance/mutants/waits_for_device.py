"""Reads the longest sequence length from the device in each build."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_batch(self, batch, split, *, fast, graph):
        if batch.seq_lens.max().item() < 0:
            raise ValueError
        return super().plan_batch(batch, split, fast=fast, graph=graph)
