"""Includes the sink in the LSE, and declares that it does not."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    lse_includes_sink = False


class MutantBackend(TorchBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
