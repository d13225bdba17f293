"""Ignores the value scale of an FP8 cache."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        if self._codec is not None:
            self._codec = evolve(self._codec, value_scale=None, output_factor=None)
