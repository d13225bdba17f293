"""Copies the slopes when a layer is made, and never again."""

from __future__ import annotations

from attrs import evolve

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
