"""Has a finite LSE for rows without a key, as the decode kernels of a library do: merged, they would count."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if lse is not None and metadata.graph is not None:
            lse.clamp_(min=-49_997.7)
