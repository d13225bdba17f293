"""Takes queries of a host without lengths on the CPU for equally long ones, and reads no lengths."""

from __future__ import annotations

import torch
from attrs import evolve

from kit.tests.conformance.minimal.least import LeastImpl


class MutantImpl(LeastImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        if self.agreement.requirements.query_lens_cpu_kind == "absent":
            starts = torch.arange(batch.num_reqs + 1) * batch.num_actual_tokens // batch.num_reqs
            metadata = evolve(metadata, batch=evolve(batch, query_start_loc=starts.int()))
        super().run(query, key, value, kv_cache, metadata, output, lse)
