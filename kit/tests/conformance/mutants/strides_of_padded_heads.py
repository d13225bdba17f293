"""Pads query heads to 8, and returns the first numbers of the padded output."""

from __future__ import annotations

import torch

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        heads = -self.num_q_heads % 8
        padded = torch.zeros(len(output), self.num_q_heads + heads, self.head_size_v, dtype=output.dtype)
        super().run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
        padded[:, : self.num_q_heads] = output.view(len(output), self.num_q_heads, -1)
        tokens = metadata.batch.num_actual_tokens
        output[:tokens] = padded.flatten()[: output[:tokens].numel()].view(tokens, -1)
