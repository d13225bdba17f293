"""Quantizes with the scales of make_impl for ever."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def parameters_changed(self):
        if "_codec" not in vars(self):
            super().parameters_changed()
