"""Ignores the shared prefix."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def _run(self, plan, query, source, results):
        super()._run(evolve(plan, prefix=None), query, source, results)
