"""Hides selected tokens that are later than the query, though the selection alone hides tokens."""

from __future__ import annotations

import torch

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_sparse(self, query, key, kv_cache, metadata, indices, index_lens, output, lse):
        slots = metadata.batch.slot_mapping
        rows = torch.arange(len(slots), device=slots.device)
        is_later = (indices[: len(slots), :, None] == slots) & (rows > rows[:, None])[:, None]
        indices = indices.clone()
        indices[: len(slots)].masked_fill_(is_later.any(2) & (indices[: len(slots)] >= 0), -1)
        super().run_sparse(query, key, kv_cache, metadata, indices, index_lens, output, lse)
