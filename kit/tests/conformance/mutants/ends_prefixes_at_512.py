"""Reads the first 512 keys of a shared prefix."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_batch(self, batch, split, *, fast, graph):
        if batch.common_prefix_len > 512:
            lens = batch.seq_lens_cpu - (batch.common_prefix_len - 512)
            table = batch.block_table[:, (batch.common_prefix_len - 512) // self.agreement.block_size :]
            batch = evolve(batch, common_prefix_len=512, seq_lens_cpu=lens, seq_lens=lens, block_table=table)
        return super().plan_batch(batch, split, fast=fast, graph=graph)
