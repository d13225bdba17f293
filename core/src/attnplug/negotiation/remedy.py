"""
The way out of a refusal: the smallest change that makes a candidate serve.

What may change, in this order: what is installed, what the engine asks, the device. What the *model* asks never
changes: a remedy that alters the model's numbers
is none. Every remedy is tried before it is given: `find_remedy` returns only changes that `negotiate` accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from attnplug.errors import AttnplugError
from attnplug.manifest.constraint import Constraint, Exact, Range
from attnplug.manifest.schema import Holds, IsInstalled
from attnplug.negotiation.negotiate import Question, negotiate
from attnplug.request.capability import HARDWARE
from attnplug.request.device import Device
from attnplug.request.domain import Flag, Integer, Level, Name, Names
from attnplug.request.fields import FIELDS, fields_of
from attnplug.request.requirements import Requirements, neutral

if TYPE_CHECKING:
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.reason import Reason

_ENGINE = tuple(item.name for item in fields_of("engine"))


@frozen
class Remedy:
    """
    One way out. Applying all of its parts makes the candidate serve; where `lacks` is not empty there is none.

    Attributes:
        install: Requirements to install, as pip takes them.
        engine: Engine fields to ask for instead, with their values.
        device: The device to run on instead.
        action: A step in words: a setting to change, a plugin to repair.
        lacks: The model's needs that the candidate cannot meet.
    """

    install: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(factory=dict, hash=False)
    device: Device | None = None
    action: str = ""
    lacks: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether there is a way out at all."""
        return not self.lacks

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
        return cls(tuple(data["install"]), engine, device, data["action"], tuple(data["lacks"]))

    def __str__(self) -> str:
        if self.lacks:
            return f"none: this variant lacks {', '.join(self.lacks)}"
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
        for engine, device in _smallest(subject, question):
            return Remedy(candidate.install, engine, device, action)
    lacks = tuple(dict.fromkeys(_lack(reason) for reason in outcome.objections if _is_about_model(reason)))
    return Remedy(lacks=lacks or tuple(dict.fromkeys(str(reason) for reason in outcome.objections)))


def _smallest(candidate: Candidate, question: Question) -> Iterator[tuple[dict[str, Any], Device | None]]:
    """Yield the smallest change that works, at most one: first on the same device, then on others."""
    for device in (None, *_devices(candidate, question)):
        there = Question(question.requirements, device or question.device)
        if any(FIELDS[name].kind != "engine" for name in _objected(candidate, there)):
            continue  # no engine field answers an objection to the model or to this device
        for changes in _changes(candidate, there):
            changed = _changed(there, changes)
            if changed is not None and not negotiate(candidate, changed).objections:
                yield changes, device
                return


def _changed(question: Question, changes: dict[str, Any]) -> Question | None:
    if not changes:
        return question
    try:
        return Question(question.requirements.evolve(**changes), question.device)
    except AttnplugError:
        return None  # the changes contradict each other


def _changes(candidate: Candidate, question: Question) -> Iterator[dict[str, Any]]:
    """
    Yield sets of engine fields with other values, fewest first and nearest values first.

    Each field that is objected to has to change; those that rules mention may, since they can switch a rule off.
    """
    objected = _objected(candidate, question)
    rules = candidate.variant.rules if candidate.variant else ()
    mentioned = {condition.field for rule in rules for condition in (*rule.when, *rule.need)}
    if mentioned & {"block_size", "kv_layout"}:
        mentioned.add("paged")  # without a paged cache there is no block size for a rule to refuse
    if "decode_query_len" in mentioned:
        mentioned.add("phases")  # only a request that decodes has a decode query length
    ruled = tuple(name for name in _ENGINE if name in mentioned and name not in objected)
    options = {name: _options(candidate, question, name) for name in (*objected, *ruled)}
    for size in range(len(ruled) + 1):
        for names in combinations(ruled, size):
            changing = (*objected, *names)
            for values in product(*(options[name] for name in changing)):
                yield _with_cache(question, dict(zip(changing, values, strict=True)))


def _with_cache(question: Question, changes: dict[str, Any]) -> dict[str, Any]:
    """Giving up the paged cache gives up what describes it."""
    if changes.get("paged") is False:
        asked = question.requirements
        described = {"block_size": None, "kv_layout": None, "kv_cache_dtype": "auto", "cascade": False, "dcp_size": 1}
        current = {"kv_cache_dtype": asked.dtype}
        return {**{n: v for n, v in described.items() if getattr(asked, n) != current.get(n, v)}, **changes}
    return changes


def _objected(candidate: Candidate, question: Question) -> tuple[str, ...]:
    """Return the fields whose values the candidate does not declare."""
    free = tuple((name, value) for name in ("block_size", "kv_layout") if (value := question.facts[name]) is not None)
    return tuple(asked[0] for asked in (*question.asked, *free) if candidate.objections((asked,)))


def _options(candidate: Candidate, question: Question, name: str) -> tuple[Any, ...]:
    """Return other values for an engine field, nearest first; only those that the candidate serves."""
    asked = question.facts[name]
    if asked is None and FIELDS[name].free:
        return ()  # open already: no single value serves where none of them did
    constraint = candidate.supports(name)
    nothing = neutral(name, question.facts)
    values: list[Any] = []
    if name == "features":
        declared = candidate.variant.features if candidate.variant else ()
        values = [tuple(feature for feature in asked if feature in declared)]
    elif constraint is not None:
        values = [
            constraint.first() if asked is None else constraint.nearest(asked),
            *_ordered(constraint, asked),
            *_rule_values(candidate, name, constraint),
        ]
    return tuple(dict.fromkeys(v for v in (*values, nothing) if v != asked and (v is not None or FIELDS[name].free)))


def _ordered(constraint: Constraint, asked: Any) -> list[Any]:
    """Return the members of a finite field, nearest levels first."""
    if isinstance(constraint.domain, (Integer, Names)):
        return []
    listed: list[Any] = [True, False] if isinstance(constraint.domain, Flag) else []
    if isinstance(constraint.domain, Name):
        listed = [name for name in constraint.domain.values if name != "auto"]
    if isinstance(constraint.domain, Level):
        listed.sort(key=lambda level: abs(constraint.domain.rank(level) - constraint.domain.rank(asked)))
    return [value for value in listed if constraint.allows(value)]


def _rule_values(candidate: Candidate, name: str, constraint: Constraint) -> list[Any]:
    """
    Return, for whole numbers, the allowed values around every bound that a rule draws, and the allowed sets of names.
    """
    if isinstance(constraint.domain, Names):
        return [(each,) for each in constraint.domain.each.values if constraint.allows((each,))]
    if not isinstance(constraint.domain, Integer):
        return []
    found: list[Any] = list(constraint.choices())
    for rule in candidate.variant.rules if candidate.variant else ():
        for condition in (*rule.when, *rule.need):
            if isinstance(condition, Holds) and condition.field == name:
                found += constraint.intersect(condition.constraint).choices()
                found += [constraint.nearest(max(bound, 1)) for bound in _bounds(condition.constraint)]
    step = max((a.multiple_of or 1 for a in constraint.alternatives if isinstance(a, Range)), default=1)
    around = [value + step for value in found if value is not None] + [
        value - step for value in found if value is not None and value > step
    ]
    return [value for value in found + around if value is not None and constraint.allows(value)]


def _bounds(constraint: Constraint) -> Iterator[int]:
    for alternative in constraint.alternatives:
        drawn = (alternative.value,) if isinstance(alternative, Exact) else (alternative.min, alternative.max)
        for bound in drawn:
            if bound is not None:
                yield from (bound - 1, bound, bound + 1)


def _devices(candidate: Candidate, question: Question) -> Iterator[Device]:
    """Yield other devices of the declared types: the same type first, nearest compute capability first."""
    types = candidate.supports("device_type")
    declared = types.members() if types else ()
    for kind in sorted(declared, key=lambda kind: kind != question.device.type):
        vendor = candidate.supports("vendor")
        if kind != "cuda":
            device = Device(kind)
            if device != question.device:
                yield device
            continue
        if vendor is not None and not vendor.allows("nvidia"):
            yield Device("cuda", vendor=vendor.first())
            continue
        for capability in _capabilities(candidate, question):
            yield Device.cuda((capability.major, capability.minor))


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
    return tuple(dict.fromkeys(c for c in found if c is not None and c != here))


def _other_version(candidate: Candidate, objections: tuple[Reason, ...]) -> str:
    texts = [str(reason.because) for reason in objections if reason.code == "rule" and "installed" in reason.field]
    action = f"install another version ({'; '.join(texts)})" if texts else "install another version"
    return "; ".join(filter(None, (candidate.remedy, action)))


def _is_about_model(reason: Reason) -> bool:
    return any(part in FIELDS and FIELDS[part].kind in ("model", "derived") for part in reason.field.split(" and "))


def _lack(reason: Reason) -> str:
    if reason.code == "rule":
        return f"{reason.field}={reason.wanted} ({reason.because})"
    return f"{reason.field}={reason.wanted}"
