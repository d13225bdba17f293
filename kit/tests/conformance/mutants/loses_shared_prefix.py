"""Ignores the shared prefix."""

from __future__ import annotations

from attrs import evolve

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def _run(self, plan, query, source, results):
        super()._run(evolve(plan, prefix=None), query, source, results)


class MutantBackend(TorchBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
