"""Reads as much of a value as of a key, where heads are first."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if self.agreement.kv_layout == "HND" and self.head_size_v > self.head_size:
            output.view(-1, self.num_q_heads, self.head_size_v)[..., self.head_size :] = 0
