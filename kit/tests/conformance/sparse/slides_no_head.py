"""Uses the pattern of the first head for all heads."""

from __future__ import annotations

from kit.tests.conformance.sparse.patterned import PatternedImpl


class MutantImpl(PatternedImpl):
    def slide(self, own, head):
        return 0 * head
