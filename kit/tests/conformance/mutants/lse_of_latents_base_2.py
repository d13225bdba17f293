"""Returns the LSE of latents to base 2, as kernels for them do."""

from __future__ import annotations

from math import e, log2

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if lse is not None and self.agreement.requirements.latent:
            lse[: metadata.batch.num_actual_tokens] *= log2(e)
