"""Uses one KV layout, whatever the agreement says."""

from __future__ import annotations

from attnplug.contract.inputs.kv_cache import CacheTensor
from attnplug.torch_backend.backend import TorchBackend


class MutantBackend(TorchBackend):
    def cache_tensors(self, num_blocks):
        found = super().cache_tensors(num_blocks)
        return {role: CacheTensor(one.shape, one.dtype, one.block_axis) for role, one in found.items()}
