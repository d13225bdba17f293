"""Shifts the pattern per query head, where it is per KV head."""

from __future__ import annotations

from kit.tests.conformance.sparse.patterned import PatternedImpl


class MutantImpl(PatternedImpl):
    def slide(self, own, head):
        return 0 * head if own.get("homo_head") else head * max(1, own["vert_stride"] // self.num_q_heads)
