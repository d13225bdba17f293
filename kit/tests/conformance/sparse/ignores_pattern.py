"""Attends to every key."""

from __future__ import annotations

from kit.tests.conformance.sparse.patterned import PatternedImpl


class MutantImpl(PatternedImpl):
    def seen(self, queries, keys):
        return (keys <= queries[None, :, None]).expand(self.num_q_heads, -1, -1)
