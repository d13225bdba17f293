"""Copies the slopes when a layer is made, and never again."""

from __future__ import annotations

from attrs import evolve

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    slopes = None

    def parameters_changed(self):
        given = self.layer
        if given.alibi_slopes is not None:
            self.slopes = given.alibi_slopes.clone() if self.slopes is None else self.slopes
            self.layer = evolve(given, alibi_slopes=self.slopes)
        super().parameters_changed()
        self.layer = given


class MutantBackend(TorchBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
