"""Attends to one token more than the window has."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        left, right = self.window
        self.window = (left + 1 if left >= 0 else left, right)


class MutantBackend(TorchBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
