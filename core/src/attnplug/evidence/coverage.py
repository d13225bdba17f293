"""
Evidence: what a run of the conformance kit has shown of one candidate on one device, as data; and what of an agreement
it does not cover.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from attnplug.evidence.ranges import HEADS, RANGES, shown
from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.reason import Unverified
from attnplug.request.domains import Names
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.evidence.ranges import Interval
    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.candidate import Candidate
    from attnplug.request.device import Device

_MATCHED: Final = frozenset({"device_type", "vendor", "compute_capability"})  # evidence for another device is not read


@frozen(eq=False)
class Evidence:
    """
    The outcome of one run.

    Attributes:
        id: ``backend/variant``.
        distribution: The distribution that offered it, with its version.
        device: Where it ran.
        passed: Whether nothing failed and nothing was left out.
        served: The (field, value) pairs that a passed test exercised, in the kit's spelling.
        unreached: Declared pairs that the kit could not exercise there, with the reason.
        origin: The file, for messages.
        features: The open features of every request of the run: it shows nothing about requests without them.
        ranges: The smallest and the largest value that ran, by field; None for a file of format 1, whose values are
            exact.
        part: "part of the kit (N of M tests)" for a run of some tests, which shows nothing; empty for the whole kit.
    """

    id: str
    distribution: str
    device: Device
    passed: bool
    served: frozenset[tuple[str, Any]]
    unreached: Mapping[tuple[str, Any], str] = field(factory=dict)
    origin: str = ""
    features: frozenset[str] = frozenset()
    ranges: Mapping[str, Interval] | None = None
    part: str = ""

    def covers(self, name: str, value: Any) -> bool:
        """Whether the run has exercised a value of a field: this very value, or of `RANGES` one on each side of it."""
        if self.ranges is None or name not in RANGES:
            return (name, hashable(value)) in self.served
        ends = self.ranges.get(name)
        return ends is not None and bool(ends[0] <= value <= ends[1])

    def intervals(self, name: str) -> Iterator[Interval]:
        """Yield what the run verifies of a field of `RANGES`."""
        if self.ranges is None:
            yield from ((value, value) for field, value in self.served if field == name and type(value) in (int, float))
        elif name in self.ranges:
            yield self.ranges[name]

    def counts_for(self, distribution: str, device: Device) -> bool:
        """Whether it shows anything about a distribution, version included, on a device."""
        return self.verifies and self.distribution == distribution and self.is_for(device)

    @property
    def verifies(self) -> bool:
        """Whether the whole kit ran, and passed."""
        return self.passed and not self.part

    def is_for(self, device: Device) -> bool:
        """
        Whether a device runs the same kernels as the one of the run: same type, vendor and compute capability.

        Products of one capability run the same machine code, so that their names only inform. Accelerators of other
        vendors have no capability to compare: of these the name has to be the same too.
        """
        ours, theirs = self.device, device
        if (ours.type, ours.vendor) != (theirs.type, theirs.vendor):
            return False
        if ours.compute_capability is None or theirs.compute_capability is None:
            same = ours.compute_capability is theirs.compute_capability
            return same and (ours.type == "cpu" or ours.name == theirs.name)
        return ours.compute_capability.number == theirs.compute_capability.number


def hashable(value: Any) -> Any:
    """Return a JSON value, or one as requirements have it, in a form that hashes and compares."""
    if isinstance(value, Mapping):
        return tuple(sorted((name, hashable(item)) for name, item in value.items()))
    return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value


def find_unverified(
    candidate: Candidate, agreement: Agreement, device: Device, known: Sequence[Evidence]
) -> tuple[Unverified, ...]:
    """
    Return what of an agreement no evidence covers, in the order of the fields; nothing where all of it is verified.

    A value is verified where a run of the kit that passed, on such a device and of the same version, has exercised it.
    Between two verified sizes nothing is inferred; fields of `RANGES` are verified between two values of one run.

    Args:
        candidate: The candidate.
        agreement: What is agreed on with it.
        device: Where it is to run.
        known: All evidence about the candidate.
    """
    requested = frozenset(agreement.requirements.features)
    ran = [evidence for evidence in known if evidence.counts_for(candidate.distribution, device)]
    # A run with open features says nothing about requests without them: the kernels may be others.
    counting = [evidence for evidence in ran if evidence.features <= requested]
    if not counting:
        return (_other_features(device, ran) if ran else _nothing(candidate, device, known),)
    has_heads = any(evidence.ranges is not None for evidence in counting)
    return tuple(
        Unverified(name, _plain(name, value), _because(name, value, counting))
        for name, value in _needing_evidence(candidate, agreement, device, has_heads=has_heads)
        if not any(evidence.covers(name, value) for evidence in counting)
    )


def _nothing(candidate: Candidate, device: Device, known: Sequence[Evidence]) -> Unverified:
    """Say why no evidence counts."""
    here = [evidence for evidence in known if evidence.is_for(device)]
    own = [evidence for evidence in here if evidence.distribution == candidate.distribution]
    others = sorted({evidence.distribution for evidence in here if evidence.verifies})
    if others and not own:
        return Unverified("distribution", candidate.distribution, f"verified is {', '.join(others)}")
    plain = _plain_device(device)
    why = f"the conformance kit has failed on {plain}" if own else f"no run of the conformance kit on {plain} is known"
    if own and all(evidence.part for evidence in own):
        why = f"only {own[0].part} was run on {plain}"
    return Unverified("device", plain, why)


def _other_features(device: Device, ran: Sequence[Evidence]) -> Unverified:
    """Say that every run that would count requested open features that this request does not."""
    requested = " or ".join(sorted({", ".join(sorted(evidence.features)) for evidence in ran}))
    plain = _plain_device(device)
    because = f"every run of the conformance kit on {plain} requested more: features={requested}"
    return Unverified("device", plain, because)


def _plain_device(device: Device) -> str:
    return str(evolve(device, name=None))


def _needing_evidence(
    candidate: Candidate, agreement: Agreement, device: Device, *, has_heads: bool
) -> Iterator[tuple[str, Any]]:
    """
    Yield what is requested of fields that the variant declares, a list name by name, and of heads if runs have them.

    Nothing else needs evidence: an undeclared field is served at its neutral value only, or is declared open, which
    means that no kernel depends on it.
    """
    wanted, variant = agreement.requirements, candidate.variant
    declared = variant.supports if variant else {}
    facts = {
        **dict(wanted.requested()),
        "paged": wanted.paged,  # calls without pages have separate kernels
        **{name: getattr(agreement, name) for name in CACHE_TERMS},
        **device.facts(),
    }
    if wanted.latent:  # whose form follows
        facts.pop("kv_cache_form")
    besides = {"features"}
    if has_heads:
        facts["gqa_ratio"] = wanted.gqa_ratio
        besides |= {*HEADS}
    for name, item in FIELDS.items():
        value = facts.get(name)
        if value is None or name in _MATCHED or (name not in declared and name not in besides):
            continue
        if isinstance(item.domain, Names):
            yield from ((name, (each,)) for each in value)
        else:
            yield name, value


def _plain(name: str, value: Any) -> Any:
    domain = FIELDS[name].domain
    return value[0] if isinstance(domain, Names) else domain.dump(value)


def _because(name: str, value: Any, counting: Sequence[Evidence]) -> str:
    """Say what is verified of the field instead."""
    unreached = {item: because for evidence in counting for item, because in evidence.unreached.items()}
    exact = unreached.get((name, hashable(value)))
    if exact is not None:
        return exact
    intervals = [each for evidence in counting for each in evidence.intervals(name)] if name in RANGES else []
    if intervals:
        return shown(value, intervals)
    verified = sorted({each for evidence in counting for field, each in evidence.served if field == name}, key=_place)
    if verified and name in RANGES:
        return "no run had longer sequences"
    if verified:
        return f"verified {'is' if len(verified) == 1 else 'are'} {', '.join(map(_text, verified))}"
    return next((why for (field, _), why in unreached.items() if field == name), "no test has requested it")


def _place(value: Any) -> tuple[bool, Any]:
    """Order numbers by size, then everything else by its text: a file may hold anything."""
    return (False, value) if type(value) in (int, float) else (True, str(value))


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
