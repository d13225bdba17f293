"""Uses the pattern of the first head for all heads."""

from __future__ import annotations

from sparse.patterned import PatternedBackend, PatternedImpl

from attnplug.contract import hookimpl


class MutantImpl(PatternedImpl):
    def slide(self, own, head):
        return 0 * head


class MutantBackend(PatternedBackend):
    impl_class = MutantImpl


@hookimpl
def attnplug_backend():
    return MutantBackend
