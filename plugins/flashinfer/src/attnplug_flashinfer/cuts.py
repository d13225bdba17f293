"""Which kind of wrapper attends which requests. The probe asks too, before torch is imported: nothing here needs it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from attnplug import Agreement


@frozen
class Cut:
    """
    Which requests at the front of a step, or behind an earlier cut, are of a kind of their own.

    Attributes:
        kind: Their kind.
        shortest: Rows that each has at least. Padded requests have none.
        longest: Rows that each has at most.
    """

    kind: str
    shortest: int
    longest: int

    def takes(self, length: int) -> bool:
        """Whether a request of so many rows is of this kind."""
        return self.shortest <= length <= self.longest


REST: Final = Cut("prefill", 0, sys.maxsize)
"""What no other cut takes."""


def cuts_of(agreement: Agreement) -> tuple[Cut, ...]:
    """
    Return which requests are of which kind, in paged steps. The last cut takes every request that others leave.

    No decode of the library's own knows sinks, or a padded request among others. Few rows per request, ``"short"``, run
    the kernels for Ampere in both variants: those put the rows of all query heads of a group into one tile, and split
    the keys of a request. Those for Hopper read all keys once per query head.
    """
    asked, cuts = agreement.requirements, []
    prefills = "prefill" in asked.phases
    if not asked.sinks:
        cuts.append(Cut("decode", 1, 1))
    if agreement.variant != "fa2" and (asked.sinks or asked.cascade or asked.decode_query_len > 1 or not prefills):
        cuts.append(Cut("short", 0, asked.decode_query_len))
        return (*cuts, REST) if prefills else tuple(cuts)
    return (*cuts, REST)


def prefix_kind(kind: str, cuts: tuple[Cut, ...]) -> str:
    """Return the kind that attends a shared prefix where a step's last rows are of `kind`: all rows are one request."""
    return next(cut.kind for cut in cuts if cut.kind != "decode") if kind == "decode" else kind


def kinds_of_steps(agreement: Agreement) -> tuple[str, ...]:
    """Return the kinds that steps under an agreement may have."""
    return tuple(cut.kind for cut in cuts_of(agreement)) if agreement.requirements.paged else ("ragged",)


def kind_of_profile(agreement: Agreement) -> str:
    """Return the kind that a profiling run makes. The kernels with sinks read pages only."""
    return cuts_of(agreement)[-1].kind if agreement.requirements.sinks else "ragged"
