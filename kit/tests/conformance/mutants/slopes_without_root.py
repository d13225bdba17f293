"""Computes linear ALiBi where sqrt was requested."""

from __future__ import annotations

from attrs import evolve

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        shape = evolve(shape, alibi=shape.alibi and "linear")
        return super()._plan(key, shape, batch, graph)


class MutantBackend(TorchBackend):
    builder_class = MutantBuilder


@hookimpl
def attnplug_backend():
    return MutantBackend
