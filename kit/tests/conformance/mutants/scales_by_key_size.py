"""Scales the scores of latents by the size of their keys."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def parameters_changed(self):
        if self.agreement.requirements.latent:
            self.scale = self.head_size**-0.5
        super().parameters_changed()
