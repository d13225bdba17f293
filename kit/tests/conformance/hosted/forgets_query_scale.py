"""Ignores the scale of quantized queries."""

from __future__ import annotations

from hosted.quantized_queries import QuantizedImpl

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend


class WrongImpl(QuantizedImpl):
    def _of_queries(self):
        return 1.0


class WrongBackend(TorchBackend):
    impl_class = WrongImpl


@hookimpl
def attnplug_backend():
    return WrongBackend
