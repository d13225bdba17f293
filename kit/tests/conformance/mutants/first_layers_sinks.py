"""Plans with the first layer's sinks for all layers."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def __init__(self, backend, impls, state):
        super().__init__(backend, impls, state)
        for impl in impls:
            impl._sinks = impls[0]._sinks
