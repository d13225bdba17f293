"""Ignores the scale of the layer."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        factor = 1.0 if self._codec is None else self._codec.score_factor
        self._score_params = evolve(self._score_params, scale=self.head_size**-0.5 * factor)
