"""Plans with the block size that the manifest names first."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def __init__(self, backend, impls, state):
        super().__init__(backend, impls, state)
        if self.agreement.block_size is not None:
            self._params = {key: evolve(params, block_size=16) for key, params in self._params.items()}
