"""Leaves out keys at distances where slopes hide all but extraordinary ones."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        slopes = self.layer.alibi_slopes
        if slopes is not None and self.is_paged:
            lens = metadata.batch.seq_lens.tolist()
            ends = metadata.batch.query_start_loc[1:].tolist()
            for length, end in zip(lens, ends, strict=True):
                first = kv_cache.k[metadata.batch.block_table[0, 0], 0].float().abs().max()
                if length * float(slopes.max()) > 40 and first > 8:
                    output[end - 1] = 0
