"""
The way out of a refusal: the smallest change that makes a candidate serve.

What may change, in this order: what is installed, what the engine asks, the device. What the *model* asks never
changes: a remedy that alters the model's numbers is none. Every remedy is tried before it is given: `find_remedy`
returns only changes that `negotiate` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from attnplug.errors import AttnplugError
from attnplug.manifest.constraint import Range
from attnplug.manifest.schema import Holds, IsInstalled
from attnplug.negotiation.changes import changes_of, objected_fields
from attnplug.negotiation.negotiate import Question, negotiate
from attnplug.request.capability import HARDWARE, ComputeCapability
from attnplug.request.device import Device, default_vendor
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.reason import Reason
    from attnplug.request.requirements import Requirements


@frozen
class Remedy:
    """
    One way out. Applying all of its parts makes the candidate serve; where `lacks` or `needs` are not empty there is
    none.

    Attributes:
        install: Requirements to install, as pip takes them.
        engine: Engine fields to ask for instead, with their values.
        device: The device to run on instead.
        action: A step in words: a setting to change, a plugin to repair.
        lacks: What the model asks for and the candidate does not serve.
        needs: What the candidate serves nothing without, and the model does not ask for.
    """

    install: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(factory=dict, hash=False)
    device: Device | None = None
    action: str = ""
    lacks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether there is a way out at all."""
        return not (self.lacks or self.needs)

    def apply(self, requirements: Requirements, device: Device) -> tuple[Requirements, Device]:
        """Return the question as the remedy would ask it."""
        return (requirements.evolve(**self.engine) if self.engine else requirements), self.device or device

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``text`` is the remedy in words."""
        return {
            "install": list(self.install),
            "engine": {
                name: FIELDS[name].domain.dump(value) if value is not None else None
                for name, value in self.engine.items()
            },
            "device": self.device.to_dict() if self.device else None,
            "action": self.action,
            "lacks": list(self.lacks),
            "needs": list(self.needs),
            "text": str(self),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Remedy:
        """Read what `to_dict` wrote."""
        engine = {
            name: FIELDS[name].domain.canonical(value) if value is not None else None
            for name, value in data["engine"].items()
        }
        device = Device.from_dict(data["device"]) if data["device"] else None
        return cls(tuple(data["install"]), engine, device, data["action"], tuple(data["lacks"]), tuple(data["needs"]))

    def __str__(self) -> str:
        if not self.possible:
            lacks = [f"lacks {', '.join(self.lacks)}"] if self.lacks else []
            needs = [f"needs {', '.join(self.needs)}"] if self.needs else []
            return f"none: this variant {', and '.join(lacks + needs)}"
        parts = [self.action] if self.action else []
        parts += (
            [
                "pip install "
                + " ".join(f"'{text}'" if " " in text or "<" in text or ">" in text else text for text in self.install)
            ]
            if self.install
            else []
        )
        parts += (
            ["ask for " + ", ".join(f"{name}={value!r}" for name, value in self.engine.items())] if self.engine else []
        )
        parts += [f"run on {self.device}"] if self.device else []
        return "; ".join(parts)


def find_remedy(candidate: Candidate, question: Question, relaxed: Callable[[Candidate], Candidate]) -> Remedy:
    """
    Find the way out for a candidate that cannot serve.

    Args:
        candidate: The candidate as it stands.
        question: What was asked of it.
        relaxed: Returns the candidate as if everything that it requires were installed.
    """
    if candidate.variant is None or candidate.standing == "broken":
        return Remedy(install=candidate.install, action=candidate.remedy)
    outcome = negotiate(candidate, question)
    versions = any(isinstance(c, IsInstalled) for rule in candidate.variant.rules for c in (*rule.when, *rule.need))
    for subject, action in (
        (candidate, candidate.remedy),
        *(((relaxed(candidate), _other_version(candidate, outcome.objections)),) if versions else ()),
    ):
        found = _smallest(subject, question)
        if found is not None:
            return Remedy(candidate.install, *found, action)
    return _none(outcome.objections, question)


def _smallest(candidate: Candidate, question: Question) -> tuple[dict[str, Any], Device | None] | None:
    """Return the smallest change that works, or None: on the same device if any does, else on the nearest of others."""
    here = _fewest(candidate, question)
    if here is not None:
        return here, None
    best: tuple[dict[str, Any], Device | None] | None = None
    for device in _devices(candidate, question):
        most = None if best is None else len(best[0]) - 1
        there = _fewest(candidate, Question(question.requirements, device), most)
        if there is not None:
            best = there, device
            if not there:
                break  # no other device takes less than nothing
    return best


def _fewest(candidate: Candidate, question: Question, most: int | None = None) -> dict[str, Any] | None:
    """Return the fewest changes of engine fields that work, if there are any, and no more than so many."""
    if any(FIELDS[name].kind != "engine" for name in objected_fields(candidate, question)):
        return None  # no engine field answers an objection to the model or to this device
    for changes in changes_of(candidate, question):
        if most is not None and len(changes) > most:
            break
        changed = _changed(question, changes)
        if changed is not None and not negotiate(candidate, changed).objections:
            return changes
    return None


def _changed(question: Question, changes: dict[str, Any]) -> Question | None:
    if not changes:
        return question
    try:
        return Question(question.requirements.evolve(**changes), question.device)
    except AttnplugError:
        return None  # the changes contradict each other


def _devices(candidate: Candidate, question: Question) -> Iterator[Device]:
    """Yield other devices of the declared types: the same type first, nearest compute capability first."""
    types = candidate.supports("device_type")
    declared = types.members() if types else ()
    for kind in sorted(declared, key=lambda kind: kind != question.device.type):
        vendors = candidate.supports("vendor")
        for vendor in vendors.choices() if vendors and kind == "cuda" else (default_vendor(kind),):
            if vendor == "nvidia":
                for capability in _capabilities(candidate, question):
                    yield Device.cuda((capability.major, capability.minor))
            elif (device := Device(kind, vendor=vendor)) != question.device:
                yield device


def _capabilities(candidate: Candidate, question: Question) -> tuple[Any, ...]:
    declared = candidate.supports("compute_capability")
    if declared is None:
        return ()
    here = question.device.compute_capability
    near = [declared.nearest(here)] if here else []
    drawn = [
        capability
        for rule in (candidate.variant.rules if candidate.variant else ())
        for condition in (*rule.when, *rule.need)
        if isinstance(condition, Holds) and condition.field == "compute_capability"
        for capability in condition.constraint.choices()
        if declared.allows(capability)
    ]
    ends = [a.max for a in declared.alternatives if isinstance(a, Range) and a.max is not None]
    built = (capability for capability in reversed(HARDWARE) if declared.allows(capability))
    found = (*near, *declared.choices(), *drawn, *ends, *built)
    others = dict.fromkeys(c for c in found if c is not None and c != here)
    return tuple(sorted(others, key=lambda c: ComputeCapability(c.major, c.minor) not in HARDWARE))


def _other_version(candidate: Candidate, objections: tuple[Reason, ...]) -> str:
    texts = [str(reason.because) for reason in objections if reason.code == "rule" and "installed" in reason.field]
    action = f"install another version ({'; '.join(texts)})" if texts else "install another version"
    return "; ".join(filter(None, (candidate.remedy, action)))


def _none(objections: tuple[Reason, ...], question: Question) -> Remedy:
    """Say what of the model stands in the way; where nothing of it does, what no change of the rest gets around."""
    told = [reason for reason in objections if _is_about_model(reason)] or objections
    lacks, needs = {}, {}
    for reason in told:
        because = f" ({reason.because})" if reason.code == "rule" and reason.because else ""
        if reason.supported and reason.code == "rule" and reason.field not in question.names:
            needs[reason.supported] = f"{reason.supported}{because}"
        else:
            lacks[reason.asked] = f"{reason.asked}{because}"
    return Remedy(lacks=tuple(lacks.values()), needs=tuple(needs.values()))


def _is_about_model(reason: Reason) -> bool:
    return any(part in FIELDS and FIELDS[part].kind in ("model", "derived") for part in reason.field.split(" and "))
