"""Attends to local blocks only."""

from __future__ import annotations

from kit.tests.conformance.sparse.patterned import PatternedImpl


class MutantImpl(PatternedImpl):
    def seen(self, queries, keys):
        own = dict(self.layer.block_sparse)
        i, j = queries[None, :, None] // own["block_size"], keys[None, None, :] // own["block_size"]
        return ((keys <= queries[None, :, None]) & (i - j < own["local_blocks"])).expand(self.num_q_heads, -1, -1)
