"""Has kernels for decodes of 1, 2, 4 and more tokens."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if self.is_paged and metadata.num_decodes and metadata.num_decode_tokens == 3 * metadata.num_decodes:
            output[2 : metadata.num_decode_tokens : 3] = 0
