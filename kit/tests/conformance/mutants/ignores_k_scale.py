"""Ignores the key scale of an FP8 cache."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.codec import codec_of
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        self._codec = codec_of(evolve(layer, k_scale=1.0, k_scale_tensor=None), self.agreement)
        if self._codec is not None:
            self._score_params = evolve(self._score_params, scale=self.scale * self._codec.score_factor)
