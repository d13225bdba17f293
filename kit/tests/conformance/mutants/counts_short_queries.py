"""Takes as many requests at the front for decodes as there are short queries, wherever these are."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        starts = metadata.batch.query_start_loc_cpu
        short = int((starts.diff() <= self.agreement.requirements.decode_query_len).sum())
        if self.is_paged and metadata.num_prefills:
            output[short : int(starts[short])] = 0  # rows that decodes of one token would not have
