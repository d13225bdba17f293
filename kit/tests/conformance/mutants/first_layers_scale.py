"""Plans with the first layer's scale for all layers."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def __init__(self, backend, impls, state):
        super().__init__(backend, impls, state)
        for impl in impls:
            impl._score_params = evolve(impl._score_params, scale=impls[0]._score_params.scale)
