"""Takes a decode of one token that is beside longer ones for the first of its request."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        batch = metadata.batch
        lens = batch.query_start_loc_cpu.diff()[: metadata.num_decodes].tolist()
        for request, (start, count) in enumerate(zip(batch.query_start_loc_cpu.tolist(), lens, strict=False)):
            if count == 1 < max(lens) and int(batch.seq_lens[request]) > 1:
                output[start] = 0
