"""Writes the rows of prefills before those of decodes."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        rows = slice(metadata.batch.num_actual_tokens)
        output[rows] = output[rows].roll(-metadata.num_decode_tokens, 0)
