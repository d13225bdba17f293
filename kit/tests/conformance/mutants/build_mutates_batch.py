"""Changes the host's block table in place."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def plan_batch(self, batch, split, *, fast, graph):
        if batch.block_table is not None:
            batch.block_table.clamp_(max=1000)
        return super().plan_batch(batch, split, fast=fast, graph=graph)


class MutantBackend(TorchBackend):
    builder_class = MutantBuilder


@hookimpl
def attnplug_backend():
    return MutantBackend
