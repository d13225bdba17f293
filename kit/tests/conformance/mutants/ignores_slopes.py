"""Ignores the ALiBi slopes."""

from __future__ import annotations

from attrs import evolve

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        slopes = self._score_params.slopes
        self._score_params = evolve(self._score_params, slopes=None if slopes is None else slopes * 0)


class MutantBackend(TorchBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
