"""Attends to every key."""

from __future__ import annotations

from sparse.patterned import PatternedBackend, PatternedImpl

from attnplug.contract import hookimpl


class MutantImpl(PatternedImpl):
    def seen(self, queries, keys):
        return (keys <= queries[None, :, None]).expand(self.num_q_heads, -1, -1)


class MutantBackend(PatternedBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
