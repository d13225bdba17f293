"""Writes the rotary part of a key before its latent."""

from __future__ import annotations

import torch

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def update_kv_cache(self, key, value, kv_cache, slot_mapping, *, padded=True):
        if self.agreement.requirements.latent:
            key = torch.cat([key[..., self.head_size_v :], key[..., : self.head_size_v]], -1)
        super().update_kv_cache(key, value, kv_cache, slot_mapping, padded=padded)
