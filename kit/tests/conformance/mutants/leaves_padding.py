"""Writes no row of a padded request, as kernels do that take start locations."""

from __future__ import annotations

import torch

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        before = output.clone()
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if metadata.graph is not None and (lens := metadata.batch.seq_lens).shape[0] == output.shape[0]:
            output.copy_(torch.where(lens[:, None] == 0, before, output))
