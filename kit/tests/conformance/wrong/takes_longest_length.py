"""Uses the longest length for each request where there are no CPU sequence lengths."""

from __future__ import annotations

import torch
from attrs import evolve

from kit.tests.conformance.minimal.least import LeastImpl


class MutantImpl(LeastImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        if batch.seq_lens_cpu is None:
            lengths = torch.full_like(batch.seq_lens, batch.max_seq_len)
            metadata = evolve(metadata, batch=evolve(batch, seq_lens=lengths))
        super().run(query, key, value, kv_cache, metadata, output, lse)
