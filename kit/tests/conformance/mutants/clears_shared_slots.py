"""Writes K/V in a layer that shares the cache of another one."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.ops.write import key_and_value_pages
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if self.layer.kv_sharing_target is not None:
            slots = metadata.batch.slot_mapping
            for pages in key_and_value_pages(kv_cache):
                pages.view(-1, *pages.shape[2:])[slots[slots >= 0]] = 0
        super().run(query, key, value, kv_cache, metadata, output, lse)


class MutantBackend(TorchBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
