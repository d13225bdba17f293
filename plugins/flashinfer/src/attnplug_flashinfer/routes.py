"""Which kind of wrapper attends which requests. The probe asks too, before torch is imported: nothing here needs it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from attnplug import Agreement


@frozen
class Route:
    """
    Which requests at the front of a step, or behind an earlier route, are of a kind of their own.

    Attributes:
        kind: Their kind.
        shortest: Rows that each has at least. Padded requests have none.
        longest: Rows that each has at most.
    """

    kind: str
    shortest: int
    longest: int

    def accepts(self, length: int) -> bool:
        """Whether a request of so many rows is of this kind."""
        return self.shortest <= length <= self.longest


REMAINING: Final = Route("prefill", 0, sys.maxsize)
"""What no other route accepts."""


def routes_of(agreement: Agreement) -> tuple[Route, ...]:
    """
    Return which requests are of which kind, in paged steps. The last route takes every request that others leave.

    No decode of the library's own knows sinks, or a padded request among others. Few rows per request, ``"short"``, run
    the kernels for Ampere in both variants: those put the rows of all query heads of a group into one tile, and split
    the keys of a request. Those for Hopper read all keys once per query head.
    """
    asked, routes = agreement.requirements, []
    prefills = "prefill" in asked.phases
    if not asked.sinks:
        routes.append(Route("decode", 1, 1))
    if agreement.variant != "fa2" and (asked.sinks or asked.cascade or asked.decode_query_len > 1 or not prefills):
        routes.append(Route("short", 0, asked.decode_query_len))
        return (*routes, REMAINING) if prefills else tuple(routes)
    return (*routes, REMAINING)


def prefix_kind(kind: str, routes: tuple[Route, ...]) -> str:
    """Return the kind that attends a shared prefix where a step's last rows are of `kind`: all rows are one request."""
    return next(route.kind for route in routes if route.kind != "decode") if kind == "decode" else kind


def kinds_of_steps(agreement: Agreement) -> tuple[str, ...]:
    """Return the kinds that steps under an agreement may have."""
    return tuple(route.kind for route in routes_of(agreement)) if agreement.requirements.paged else ("ragged",)


def kind_of_profile(agreement: Agreement) -> str:
    """Return the kind that a profiling run makes. The kernels with sinks read pages only."""
    return routes_of(agreement)[-1].kind if agreement.requirements.sinks else "ragged"
