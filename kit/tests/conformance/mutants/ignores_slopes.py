"""Ignores the ALiBi slopes."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        slopes = self._score_params.slopes
        self._score_params = evolve(self._score_params, slopes=None if slopes is None else slopes * 0)
