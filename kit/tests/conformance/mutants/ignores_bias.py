"""Ignores the additive mask of the batch."""

from __future__ import annotations

from attrs import evolve

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        return super()._plan(key, shape, evolve(batch, attn_bias=None), graph)


class MutantBackend(TorchBackend):
    builder_class = MutantBuilder


@hookimpl
def attnplug_backend():
    return MutantBackend
