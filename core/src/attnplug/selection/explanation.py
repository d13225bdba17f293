"""The verdict on every candidate for one request, ready to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug._columns import wrapped
from attnplug._escape import escaped
from attnplug._html import block, folded, table
from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.ranking import why_ahead, why_behind
from attnplug.negotiation.reason import Fix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.reason import Unverified
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
        with_auto: The candidates that could serve and are not permitted: those that ``"auto"`` in the list would add.
        named: The candidates that the list names, by id, backend or alias; empty where all are permitted.
        behind: The id of the runner-up: the best permitted candidate of another plugin, or the next candidate if no
            other plugin can serve; empty where no other can.
        order_because: The source of the default order for this device; empty for a device without a default order.
        needs: The steps that install what the chosen candidate was supposed to have.
        least: The candidate that can serve with the least to install, where that is not the chosen one, and its steps.
        measured: The measurement behind the decision, in a line; empty where no entry of a profile decided.
        profile_notes: What of the profile does not count on this device, and why; a sentence each.
    """

    requirements: Requirements
    device: Device
    chosen: Selection | None
    verdicts: tuple[Verdict, ...]
    assumed_installed: bool = False
    listed: tuple[str, ...] = ()
    origins: tuple[tuple[str, str], ...] = ()
    with_auto: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    behind: str = ""
    order_because: str = ""
    needs: tuple[str, ...] = ()
    least: tuple[str, ...] = ()
    measured: str = ""
    profile_notes: tuple[str, ...] = ()

    @property
    def runner_up(self) -> Verdict | None:
        """The verdict on the candidate that `behind` names; None where no other can serve."""
        return next((verdict for verdict in self.verdicts if verdict.id == self.behind), None)

    @property
    def why_runner_up(self) -> str:
        """Why the runner-up is behind the chosen candidate; empty where there is none."""
        runner_up = self.runner_up
        if self.chosen is None or runner_up is None:
            return ""
        return why_behind(self.chosen.decided_by, self.chosen.id, runner_up.emulated, self.order_because)

    def fixable(self) -> tuple[tuple[Verdict, Fix], ...]:
        """
        Return the verdicts that have a fix, with it: of permitted candidates, of installed ones where all are. Those of
        plugins that are not installed are left to the last, as are fixes that need another device. Where backends are
        listed without ``"auto"``, those of others are left out: they cannot help.
        """
        found = [(v, v.fix) for v in self.verdicts if v.fix is not None and v.fix.possible]
        listed = [each for each in found if each[0].id in self.named]
        installed = [each for each in found if each[0].status != "absent"]
        offered = listed if self.is_strict else listed or installed or ([] if self.with_auto else found)
        return tuple(each for each in offered if each[1].device is None) or tuple(offered)

    @property
    def is_strict(self) -> bool:
        """Whether the listed backends alone are permitted."""
        return bool(self.listed) and "auto" not in self.listed

    @property
    def tie(self) -> str:
        """How to settle a decision that only a name decided; empty where something better did."""
        if self.chosen is None or self.chosen.decided_by != "name":
            return ""
        rival = "" if self.runner_up is None else self.runner_up.id
        return (
            f"{self.chosen.id!r} and {rival!r} tie: neither is measured on {self.device}, and the name decided; settle "
            f"it with backend=[{rival!r}, 'auto'], with ATTNPLUG_BACKEND, or with a measured profile (ATTNPLUG_PROFILE)"
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
            "with_auto": list(self.with_auto),
            "runner_up": self.runner_up.id if self.runner_up else None,
            "order_because": self.order_because,
            "needs": list(self.needs),
            "least": list(self.least),
            "measured": self.measured,
            "profile_notes": list(self.profile_notes),
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
        lines = [
            f"requested: {assigned(self.requirements.to_dict())}",
            f"device: {self._where()}",
            *self.measurement(),
            self.tie,
        ]
        title = f"chosen: {self.chosen.id if self.chosen else 'none'}{self._decision()}"
        return block(title, filter(None, lines), _verdict_table(serving), *below)

    def __str__(self) -> str:
        return "\n".join(map(escaped, self._lines()))

    def folded(self) -> str:
        """Return the same for an error: permitted candidates first, and of those that are not permitted the names."""
        return "\n".join(map(escaped, self._lines(folds=True)))

    def _lines(self, *, folds: bool = False) -> Iterator[str]:
        yield from wrapped(f"requested: {assigned(self.requirements.to_dict())}")
        yield f"device: {self._where()}"
        for name, origin in self.origins:
            yield f"set: {name}={getattr(self.requirements, name)} by {origin}"
        if self.listed:
            yield from wrapped(f"permitted: {self.permitted}")
        yield f"chosen: {self.chosen.id if self.chosen else 'none'}" + self._decision()
        yield from self.measurement()
        yield from self.to_install()
        unnamed = [v for v in self.verdicts if folds and self.is_strict and v.id not in self.named]
        shown = sorted((v for v in self.verdicts if v not in unnamed), key=lambda v: folds and v.id not in self.named)
        absent = [verdict for verdict in shown if verdict.status == "absent"]
        for verdict in shown:
            if verdict not in absent:
                yield ""
                yield from lines_of(verdict)
        if unnamed:
            yield ""
            yield from wrapped(f"not permitted: {', '.join(verdict.id for verdict in unnamed)}")
        if absent:
            yield ""
            yield f"{NOT_INSTALLED}:"
            longest = max(len(verdict.id) for verdict in absent)
            for verdict in absent:
                yield f"{_INDENT}{verdict.id:<{longest}}  {verdict.fix}"
        if self.tie:
            yield ""
            yield from wrapped(self.tie)

    def measurement(self) -> Iterator[str]:
        """Yield the measurement behind the decision, and what of the profile does not count; a line each."""
        if self.measured:
            yield f"measured: {self.measured}"
        yield from (f"note: {note}" for note in self.profile_notes)

    def to_install(self) -> Iterator[str]:
        """Yield what the chosen candidate was supposed to have, and which one can serve with less; a line each."""
        if self.needs:
            yield f"needs: {', then '.join(self.needs)}"
        if self.least:
            steps = f"after {', then '.join(self.least[1:])}" if self.least[1:] else "with nothing to install"
            yield f"{self.least[0]} could serve too, {steps}"

    def _where(self) -> str:
        return f"{self.device}" + (", kernel libraries assumed installed" if self.assumed_installed else "")

    @property
    def permitted(self) -> str:
        """The permitted backends in words, with what ``"auto"`` would add to them; empty where all are permitted."""
        added = f" ('auto' would add {', '.join(self.with_auto)})" if self.with_auto else ""
        return f"{', '.join(self.listed)}{added}" if self.listed else ""

    def _decision(self) -> str:
        if self.chosen is None or not self.chosen.decided_by:
            return ""
        return f" ({why_ahead(self.chosen.decided_by)})"


_SHOWN_AS: Final = (
    ("can serve", ("chosen", "eligible")),
    ("cannot serve", ("refused", "missing_dependency", "broken")),
    ("not installed", ("absent",)),
)


def _verdict_table(verdicts: Iterable[Verdict]) -> str:
    rows = [(verdict.id, verdict.status, tuple(detail(verdict))) for verdict in verdicts]
    return table(("candidate", "status", "terms, reasons and fix"), rows)


def lines_of(verdict: Verdict, steps: Callable[[Fix], Iterable[str]] = Fix.steps) -> Iterator[str]:
    """
    Yield a verdict with all that it says, as lines that fit the terminal.

    Args:
        verdict: The verdict.
        steps: What turns a fix into its steps.
    """
    yield f"{verdict.id}  {verdict.status}" + (f"  ({verdict.distribution})" if verdict.distribution else "")
    for line in detail(verdict, steps):
        yield from wrapped(line, _INDENT)


def describe(selection: Selection, width: int) -> Iterator[str]:
    """Yield a decision, what was requested, and its verdict."""
    decided = f" ({why_ahead(selection.decided_by)})" if selection.decided_by else ""
    yield from wrapped(f"requested: {assigned(selection.requirements.to_dict())}", _INDENT, width)
    yield f"{_INDENT}chosen: {selection.id}{decided}"
    for verdict in selection.verdicts:
        if verdict.id == selection.id:
            for line in detail(verdict):
                yield from wrapped(line, _INDENT, width)


def detail(verdict: Verdict, steps: Callable[[Fix], Iterable[str]] = Fix.steps) -> Iterator[str]:
    """Yield a verdict's terms, emulations, what is unverified, reasons, and the steps of its fix, a line each."""
    if verdict.agreement is not None:
        yield from terms_of(verdict.agreement)
    if verdict.level_cost:
        yield verdict.level_cost
    for name, text in verdict.emulated.items():
        yield f"{name}: {text} (slower)"
    for item in verdict.unverified:
        yield f"{not_verified(item)}: {item}"
    for reason in verdict.reasons:
        yield f"- {reason}"
    if verdict.fix is not None:
        yield from (f"{'then' if index else 'fix:'} {step}" for index, step in enumerate(steps(verdict.fix)))


def not_verified(item: Unverified) -> str:
    """Return what precedes a requested value that no evidence covers; of a device, the item names the kit itself."""
    return "not verified" if item.field == "device" else "not verified by the conformance kit on this device"


def terms_of(terms: Agreement) -> Iterator[str]:
    """Yield what was agreed on, in a line, and in others the roles of a pair, and what is left to bind."""
    if terms.roles is not None:
        yield f"routed: pure decodes to {terms.roles.decode.id}, all other batches to {terms.roles.rest.id}"
    if terms.requirements.paged:
        values = {name: getattr(terms, name) for name in (*CACHE_TERMS, "kv_cache_dtype", "cudagraph")}
        yield assigned({name: value for name, value in values.items() if value is not None})
    if terms.requirements.late:
        yield f"left for the engine to set: {', '.join(_left_to_bind(terms))}"


def _left_to_bind(terms: Agreement) -> Iterator[str]:
    for name in terms.requirements.late:
        yield name if terms.block_sizes is None or name != "block_size" else f"{name} ({terms.block_sizes})"


def assigned(values: Mapping[str, Any]) -> str:
    """Return values as ``name=value name=value``."""
    return " ".join(f"{name}={value}" for name, value in values.items())
