"""Attends to the keys of the step without writing them into the cache."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def update_kv_cache(self, key, value, kv_cache, slot_mapping, **more):
        pass


class MutantBackend(TorchBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
