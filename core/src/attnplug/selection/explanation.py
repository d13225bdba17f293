"""The verdict on every candidate for one request, ready to read."""

from __future__ import annotations

import shutil
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug._escape import escaped
from attnplug._html import block, folded, table
from attnplug.negotiation.candidate import TERMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.verdict import Verdict
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements
    from attnplug.selection.selection import Selection

NOT_INSTALLED: Final = "not installed (not evaluated)"
"""The heading of known plugins that are absent."""

_INDENT: Final = "    "


@frozen
class Explanation:
    """
    What would be chosen, and why not the others. Printing it gives a table.

    Attributes:
        requirements: What was requested.
        device: Where it should run.
        chosen: The decision, or None where nothing can serve.
        verdicts: The verdict on every candidate: the chosen one, the eligible ones as ranked, then the rest by name.
        assumed_installed: Whether missing kernel libraries were supposed to be there.
        listed: The backends that were permitted, in order; empty for all.
        origins: The (field, origin) pairs of requirements that a setting has stated, and not the caller.
    """

    requirements: Requirements
    device: Device
    chosen: Selection | None
    verdicts: tuple[Verdict, ...]
    assumed_installed: bool = False
    listed: tuple[str, ...] = ()
    origins: tuple[tuple[str, str], ...] = ()

    @property
    def tie(self) -> str:
        """How to settle a decision that only a name decided; empty where something better did."""
        if self.chosen is None or self.chosen.decided_by != "name":
            return ""
        rival = next(verdict.id for verdict in self.verdicts if verdict.status == "eligible")
        return (
            f"{self.chosen.id!r} and {rival!r} tie, and the name decided; settle it with backend=[{rival!r}, 'auto'], "
            "with ATTNPLUG_BACKEND, or with a measured profile (ATTNPLUG_PROFILE)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "requirements": self.requirements.to_dict(),
            "device": self.device.to_dict(),
            "chosen": self.chosen.id if self.chosen else None,
            "decided_by": self.chosen.decided_by if self.chosen else "",
            "provenance": dict(self.chosen.provenance) if self.chosen else {},
            "tie": self.tie,
            "assumed_installed": self.assumed_installed,
            "listed": list(self.listed),
            "origins": dict(self.origins),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }

    def __repr__(self) -> str:
        chosen = self.chosen.id if self.chosen else "none"
        return escaped(f"<Explanation: chosen {chosen} of {len(self.verdicts)} candidates on {self.device}>")

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the decision and what else can serve; what cannot is folded."""
        serving, *others = (
            [verdict for verdict in self.verdicts if verdict.status in statuses] for _, statuses in _SHOWN_AS
        )
        below = (
            folded(f"{len(verdicts)} {title}", _verdict_table(verdicts), unfolded=not serving)
            for (title, _), verdicts in zip(_SHOWN_AS[1:], others, strict=True)
        )
        lines = [f"requested: {_assigned(self.requirements.to_dict())}", f"device: {self.device}", self.tie]
        title = f"chosen: {self.chosen.id if self.chosen else 'none'}{self._decision()}"
        return block(title, filter(None, lines), _verdict_table(serving), *below)

    def __str__(self) -> str:
        return "\n".join(map(escaped, self._lines(min(shutil.get_terminal_size().columns, 120))))

    def _lines(self, width: int) -> Iterator[str]:
        yield from _wrapped(f"requested: {_assigned(self.requirements.to_dict())}", width, "")
        yield f"device: {self.device}" + (", kernel libraries assumed installed" if self.assumed_installed else "")
        for name, origin in self.origins:
            yield f"set: {name}={getattr(self.requirements, name)} by {origin}"
        if self.listed:
            yield f"permitted: {', '.join(self.listed)}"
        yield f"chosen: {self.chosen.id if self.chosen else 'none'}" + self._decision()
        absent = [verdict for verdict in self.verdicts if verdict.status == "absent"]
        for verdict in self.verdicts:
            if verdict in absent:
                continue
            yield ""
            yield f"{verdict.id}  {verdict.status}" + (f"  ({verdict.distribution})" if verdict.distribution else "")
            for line in detail(verdict):
                yield from _wrapped(line, width, _INDENT)
        if absent:
            yield ""
            yield f"{NOT_INSTALLED}:"
            longest = max(len(verdict.id) for verdict in absent)
            for verdict in absent:
                yield f"{_INDENT}{verdict.id:<{longest}}  {verdict.fix}"
        if self.tie:
            yield ""
            yield from _wrapped(self.tie, width, "")

    def _decision(self) -> str:
        if self.chosen is None or not self.chosen.decided_by:
            return ""
        return f" (decided by {self.chosen.decided_by})"


_SHOWN_AS: Final = (
    ("can serve", ("chosen", "eligible")),
    ("cannot serve", ("refused", "missing_dependency", "broken")),
    ("not installed", ("absent",)),
)


def _verdict_table(verdicts: Iterable[Verdict]) -> str:
    rows = [(verdict.id, verdict.status, tuple(detail(verdict))) for verdict in verdicts]
    return table(("candidate", "status", "terms, reasons and fix"), rows)


def describe(selection: Selection, width: int) -> Iterator[str]:
    """Yield a decision, what was requested, and its verdict."""
    decided = f" (decided by {selection.decided_by})" if selection.decided_by else ""
    yield from _wrapped(f"requested: {_assigned(selection.requirements.to_dict())}", width, _INDENT)
    yield f"{_INDENT}chosen: {selection.id}{decided}"
    for verdict in selection.verdicts:
        if verdict.id == selection.id:
            for line in detail(verdict):
                yield from _wrapped(line, width, _INDENT)


def detail(verdict: Verdict) -> Iterator[str]:
    """Yield a verdict's terms, emulations, what is unverified, reasons and fix, a line each."""
    if verdict.agreement is not None:
        terms = verdict.agreement
        if terms.requirements.paged:
            shown = (*TERMS, "kv_cache_dtype", "cudagraph")
            values = {name: getattr(terms, name) for name in shown}
            yield " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        if terms.requirements.late:
            yield f"left to bind: {', '.join(_left_to_bind(terms))}"
    for name, text in verdict.emulated.items():
        yield f"emulates {name}: {text}"
    for item in verdict.unverified:
        yield f"unverified on this device: {item}"
    for reason in verdict.reasons:
        yield f"- {reason}"
    if verdict.fix is not None:
        yield f"fix: {verdict.fix}"


def _left_to_bind(terms: Agreement) -> Iterator[str]:
    for name in terms.requirements.late:
        yield name if terms.block_sizes is None or name != "block_size" else f"{name} ({terms.block_sizes})"


def _assigned(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return wrap(
        escaped(text),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
