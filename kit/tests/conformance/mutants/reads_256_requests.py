"""Has 8 bits for the number of a request."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if metadata.batch.num_reqs > 256:
            output[256:257] = output[:1]
