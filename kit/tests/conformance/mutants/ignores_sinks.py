"""Ignores the sinks of the layer."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        self._sinks = None
