"""Computes tanh as a quotient of powers, which overflow."""

from __future__ import annotations

import torch

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if self.logits_soft_cap is not None and self.logits_soft_cap * 8 < float(query.nan_to_num().abs().max()):
            output[: metadata.batch.num_actual_tokens] = torch.nan
