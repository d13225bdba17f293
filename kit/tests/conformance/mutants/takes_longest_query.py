"""Reads starts as if every query were as long as `max_query_len`, the number that it was given."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_batch(self, batch, split, *, fast, graph):
        if graph is None and batch.num_reqs > 1:
            starts = (batch.query_start_loc_cpu.new_tensor(range(batch.num_reqs + 1)) * batch.max_query_len).clamp(
                max=batch.num_actual_tokens
            )
            batch = evolve(batch, query_start_loc=starts, query_start_loc_cpu=starts)
        return super().plan_batch(batch, split, fast=fast, graph=graph)
