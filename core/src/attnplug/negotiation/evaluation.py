"""The evaluation of one candidate for one request: all that selection and its explanations read."""

from __future__ import annotations

from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from attrs import evolve, frozen

from attnplug.negotiation.candidate import CACHE_TERMS, LENGTHS
from attnplug.negotiation.fix import find_fix
from attnplug.negotiation.matching import Request, agree, negotiate, open_block_size, passes, passing_terms
from attnplug.negotiation.reason import Fix
from attnplug.negotiation.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.matching import CacheTerms
    from attnplug.negotiation.probe_refusals import ProbeRefusal
    from attnplug.negotiation.reason import Reason, Unverified
    from attnplug.negotiation.verdict import Status
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements


_READ_LENGTHS = "the lengths are read from the device: one synchronization per build"


class EvidenceSource(Protocol):
    """Where an evaluation looks up what is unverified. Evidence is read by nothing else here, and decides nothing."""

    def find_unverified(self, candidate: Candidate, agreement: Agreement, device: Device) -> tuple[Unverified, ...]:
        """Return what of an agreement no evidence covers on a device."""


@frozen(eq=False, slots=False)  # with slots, cached properties would slow down the access to every attribute
class Evaluation:
    """
    What one candidate comes to for one request. The fix, the agreement and what is unverified are computed when they
    are first read: most never are.

    Attributes:
        candidate: The candidate.
        request: The request.
        objections: Everything that refuses the request, rules included.
        terms: The settled terms, where nothing does.
        refusal: What the candidate's probe has refused before, and is refused here too.
        evidence: Where to look up what is unverified.
        common: The terms that all layers of a model accept, where their block size is late.
    """

    candidate: Candidate
    request: Request
    objections: tuple[Reason, ...] = ()
    terms: Mapping[str, Any] | None = None
    refusal: ProbeRefusal | None = None
    evidence: EvidenceSource | None = None
    common: tuple[CacheTerms, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether the candidate can serve the request here."""
        return self.terms is not None and self.refusal is None and self.candidate.availability == "ready"

    @property
    def status(self) -> Status:
        """The status of its verdict, unless it is chosen."""
        availability = self.candidate.availability
        if availability == "ready":
            return "eligible" if self.serves else "refused"
        return "refused" if self.objections and availability == "missing_dependency" else availability

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Everything that refuses it, with where a value is set that the caller has not stated."""
        objections = self.objections
        if self.request.origins:
            objections = tuple(_with_origin(reason, self.request.origins) for reason in objections)
        reasons = (*objections, *self.candidate.reasons)
        return reasons if self.refusal is None else (*reasons, self.refusal.finding)

    @property
    def emulated(self) -> Mapping[str, str]:
        """The requested features that it emulates, each with what that costs."""
        variant = self.candidate.variant
        read: dict[str, str] = {}
        if self.terms is not None and self.terms["reads_lengths"]:
            read = {name: _READ_LENGTHS for name in LENGTHS if name in self.request.requested_names}
        if variant is None or not variant.emulates:
            return read
        requested = self.request.requested_names | set(self.request.requirements.features)
        return {name: text for name, text in variant.emulates.items() if name in requested} | read

    @cached_property
    def agreement(self) -> Agreement | None:
        """What is agreed on, where it can serve."""
        candidate, request, terms = self.candidate, self.request, self.terms
        if not self.serves or terms is None:
            return None
        if "block_size" not in request.requirements.late:
            return agree(candidate, request, terms)
        return agree(candidate, request, *open_block_size(candidate, request, terms, self.common))

    @cached_property
    def fix(self) -> Fix | None:
        """The smallest change that makes it serve, checked to work; None where it serves already."""
        if self.serves:
            return None
        if self.refusal is not None and self.terms is not None and self.candidate.availability == "ready":
            return Fix(action=self.refusal.fix)  # it could serve, but for what its probe has found
        fix = find_fix(self.candidate, self.request)
        return self._with_probe_fix(_with_origin_changed(fix, self.request))

    @cached_property
    def unverified(self) -> tuple[Unverified, ...]:
        """What is requested and no evidence covers on this device, where it can serve."""
        if self.agreement is None or self.evidence is None:
            return ()
        return self.evidence.find_unverified(self.candidate, self.agreement, self.request.device)

    @cached_property
    def level_cost(self) -> str:
        """How a preferred term of the KV cache lowers the graph level, in words; empty where none does."""
        agreed = self.agreement
        if agreed is None:
            return ""
        for level in takewhile(lambda level: level != agreed.cudagraph, self.candidate.graph_levels):
            wanted = self.request.requirements.evolve(cudagraph=level)
            terms = negotiate(self.candidate, Request(wanted, self.request.device)).terms
            names = [name for name in CACHE_TERMS if getattr(agreed, name) not in (None, terms.get(name))]
            if names and terms and terms["reads_lengths"] == agreed.reads_lengths:
                kept, other = (
                    ", ".join(f"{name}={values(name)}" for name in names)
                    for values in (partial(getattr, agreed), terms.__getitem__)
                )
                return f"{kept} keeps cudagraph at {agreed.cudagraph}: request cudagraph={level} to get {other}"
        return ""

    def with_cache_terms(self, terms: CacheTerms, common: tuple[CacheTerms, ...] = ()) -> Evaluation:
        """Return it with other terms of the KV cache that pass: those that the layers of a model share."""
        shared = dict(zip(CACHE_TERMS, terms, strict=True))
        if self.terms is not None and common == self.common and shared.items() <= self.terms.items():
            return self
        settled = negotiate(self.candidate, self.request, shared).terms
        refusal = find_refusal(self.candidate, self.request, settled)
        return evolve(self, terms=settled, refusal=refusal, common=common)

    def accepted_terms(self) -> tuple[CacheTerms, ...]:
        """Return the terms of the KV cache that it accepts, best first, without those that its probe has refused."""
        passing = passing_terms(self.candidate, self.request, self.terms or {})
        if not self.candidate.refusals:
            return passing
        agreements = (each.agreement for each in self.candidate.refusals)
        doubtful = {tuple(getattr(each, name) for name in CACHE_TERMS) for each in agreements if each is not None}
        return tuple(
            terms for terms in passing if terms not in doubtful or self.with_cache_terms(terms).refusal is None
        )

    def accepts(self, terms: CacheTerms) -> bool:
        """Whether terms are among the `accepted_terms`."""
        passing = passes(self.candidate, self.request, self.terms or {}, terms)
        return passing and (not self.candidate.refusals or self.with_cache_terms(terms).refusal is None)

    def verdict(self, *, chosen: bool = False) -> Verdict:
        """Return what selection reports of it."""
        serves = self.serves
        return Verdict(
            self.candidate.id,
            "chosen" if chosen else self.status,
            () if serves else self.reasons,
            self.emulated if serves else {},
            self.candidate.distribution,
            self,
        )

    def _with_probe_fix(self, fix: Fix) -> Fix:
        """Return a fix, with the fix of the probe too where it leads to what the candidate's probe has refused."""
        candidate, request = self.candidate, self.request
        if candidate.refusals is None or candidate.availability == "broken" or not fix.possible:
            return fix
        changed = Request(*fix.apply(request.requirements, request.device), request.settings)
        refusal = find_refusal(candidate, changed, negotiate(candidate, changed).terms or None)
        return fix if refusal is None else evolve(fix, action=_joined(fix.action, refusal.fix))


def evaluate(candidate: Candidate, request: Request, evidence: EvidenceSource | None = None) -> Evaluation:
    """
    Evaluate one candidate for one request.

    Args:
        candidate: The candidate.
        request: The request.
        evidence: Where to look up what is unverified; without it nothing is.
    """
    if candidate.variant is None:  # absent, or broken: nothing is declared
        return Evaluation(candidate, request)
    outcome = negotiate(candidate, request)
    terms = None if outcome.objections else outcome.terms
    refusal = None
    # Without terms, or without its library, nothing would be agreed on: then only a refusal of the device counts.
    if candidate.refusals is not None:
        refusal = find_refusal(candidate, request, terms if candidate.availability == "ready" else None)
    return Evaluation(candidate, request, outcome.objections, terms, refusal, evidence)


def find_refusal(candidate: Candidate, request: Request, terms: Mapping[str, Any] | None) -> ProbeRefusal | None:
    """
    Find what the probe of a candidate has refused in this process, and refuses of a request too.

    Args:
        candidate: The candidate.
        request: The request.
        terms: What would be agreed on; None where nothing would, so that only what holds of every request is found.
    """
    if candidate.refusals is None:
        return None
    late = request.requirements.late
    agreement = None if terms is None or late else agree(candidate, request, terms)
    found = candidate.refusals.find(agreement, request.device)
    if found is not None or terms is None or not late:
        return found
    # A refusal of one binding counts for the unbound request: what a library lacks is rarely the block size.
    options = candidate.manifest.options_under(request.settings) if candidate.manifest else {}
    wanted = _without(request.requirements, late)
    return next(
        (
            each
            for each in candidate.refusals
            if each.agreement is not None
            and each.device == request.device
            and each.agreement.options == options
            and _without(each.agreement.requirements, late) == wanted
        ),
        None,
    )


def _without(requirements: Requirements, late: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that are not late."""
    return {name: value for name, value in requirements.to_dict().items() if name not in late and name != "late"}


def _with_origin(reason: Reason, origins: Mapping[str, str]) -> Reason:
    """Return a reason, one about a value that a setting requests with where it is set."""
    told = [f"{name} is set by {origins[name]}" for name in reason.field.split(" and ") if name in origins]
    return evolve(reason, because=_joined(reason.because, *told)) if told else reason


def _with_origin_changed(fix: Fix, request: Request) -> Fix:
    """Return a fix, one that changes a value that a setting requests with where to change it."""
    steps = [
        f"{name}={request.facts[name]!r} is set by {origin}: change that, or override it"
        for name, origin in request.origins.items()
        if name in fix.engine
    ]
    return evolve(fix, action=_joined(fix.action, *steps)) if steps else fix


def _joined(*texts: str) -> str:
    return "; ".join(filter(None, texts))
