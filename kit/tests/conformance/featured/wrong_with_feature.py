"""A backend that is correct until its open feature is requested: then its attention is another one."""

from __future__ import annotations

from minimal.least import LeastImpl

from attnplug.contract import Backend, hookimpl


class WrongImpl(LeastImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        if self.agreement.requirements.features:
            output.mul_(2)


class WrongBackend(Backend):
    impl_class = WrongImpl


@hookimpl
def attnplug_backend():
    return WrongBackend
