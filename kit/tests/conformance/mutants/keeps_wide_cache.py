"""Allocates an FP8 KV cache in the layer's dtype: correct results, in twice the memory."""

from __future__ import annotations

from attrs import evolve

from attnplug.contract.inputs.kv_cache import torch_dtype
from attnplug.torch_backend.backend import TorchBackend


class MutantBackend(TorchBackend):
    def cache_tensors(self, num_blocks):
        found = super().cache_tensors(num_blocks)
        wide = torch_dtype(self.agreement.requirements.dtype)
        return {role: evolve(one, dtype=wide) for role, one in found.items()}
