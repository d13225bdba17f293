"""What the kit tests: one variant of one installed backend, or a routed pair, on the device of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from attnplug import explain, load, registry
from attnplug.errors import RequirementsError, UnknownBackendError
from attnplug.manifest import IsRequested
from attnplug.negotiation import Candidate, Fix, Request, negotiate, routes
from attnplug.request import FIELDS, Device, near

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from attnplug.contract import LoadedBackend
    from attnplug.manifest import Constraint, Rule
    from attnplug.negotiation import Reason
    from attnplug.request import Requirements


_PAIR: Final = "+"
_NOT_OF_PAIRS: Final = ("batch_invariant",)  # which pairs refuse


@frozen
class Subject:
    """
    A candidate that can run here.

    Attributes:
        id: ``backend/variant``; of a routed pair both, joined by ``+``.
        device: The device of this process.
        candidate: The candidate, its manifest included; of a pair one that declares what both do, with the rules of
            both.
        features: The open features of every request, sorted.
    """

    id: str
    device: Device
    candidate: Candidate = field(eq=False, repr=False)
    features: tuple[str, ...] = ()

    @property
    def supports(self) -> Mapping[str, Constraint]:
        """What the variant declares, by field."""
        return self.candidate.variant.supports if self.candidate.variant else {}

    @property
    def open_features(self) -> tuple[str, ...]:
        """The open features that the variant lists."""
        return self.candidate.variant.features if self.candidate.variant else ()

    @property
    def rules_that_need_features(self) -> tuple[Rule, ...]:
        """The rules that refuse requests without any open feature."""
        rules = self.candidate.variant.rules if self.candidate.variant else ()
        needs, has_none = IsRequested("features", requested=True), IsRequested("features", requested=False)
        return tuple(rule for rule in rules if needs in rule.need or (has_none in rule.when and not rule.need))

    @property
    def is_interpreted(self) -> bool:
        """Whether kernels that are compiled for a GPU run on the CPU: an interpreter takes seconds for each."""
        variant = self.candidate.variant
        return self.device.type == "cpu" and variant is not None and variant.jit is not None

    @property
    def is_pair(self) -> bool:
        """Whether it is a routed pair."""
        return _PAIR in self.id

    def decides(self, requirements: Requirements) -> bool:
        """Whether it decides on a request: without pure decodes to route, the second of a pair does alone."""
        return not self.is_pair or routes(requirements)

    def objections(self, requirements: Requirements) -> tuple[Reason, ...]:
        """Return why the candidate does not serve the requirements; nothing where it does."""
        found = negotiate(self.candidate, Request(requirements, self.device)).objections
        if found or not self.is_pair:
            return found
        explained = explain(requirements, self.device, backend=self.id)  # what both serve, and do not agree on
        if explained.chosen is not None:
            return ()
        return next((each.reasons for each in explained.verdicts if each.id == self.id), ())

    def load(self, requirements: Requirements) -> LoadedBackend:
        """Return the backend for requirements, by the public entry point."""
        return load(requirements, self.device, backend=self.id)

    def __str__(self) -> str:
        return self.id


def find_subjects(name: str, device: Device | str | None = None, features: Sequence[str] = ()) -> tuple[Subject, ...]:
    """
    Return the variants of a backend that can run here, or the one that is named.

    With open features, these are the variants that list all of them.

    Args:
        name: ``backend`` or ``backend/variant``; aliases of the backend too; or two of these, joined by ``+``: a routed
            pair.
        device: The device, or its name; None for this process's.
        features: The open features of every request.

    Raises:
        DeviceError: The device's name is invalid.
        UnknownBackendError: Nothing of that name is installed, it is broken, or no variant can run here.
        RequirementsError: The features are invalid, or no variant that can run here lists all of them.
    """
    canonical = _canonical(features)
    if _PAIR in name:
        registry().check_name(name)
        sides = [find_subjects(one, device, features) for one in name.split(_PAIR)]
        return tuple(_paired(decode, rest) for decode in sides[0] for rest in sides[1] if decode != rest)
    backend, _, variant = name.partition("/")
    named = [
        item
        for item in _candidates()
        if backend in (item.backend, *item.aliases) and (not variant or item.id == f"{item.backend}/{variant}")
    ]
    if not named:
        raise _unknown(name)
    here = _device(device, named)
    ready = [item for item in named if not _reasons(item, here)]
    if not ready:
        why = "; ".join(f"{item.id}: {', '.join(map(str, _reasons(item, here)))}" for item in named)
        raise UnknownBackendError(
            f"the backend {name!r} cannot be tested on {here}",
            f"one of its variants runs there; {why}",
            "; or ".join([*_installations(named), "test it on a device that it serves"]),
        )
    return _listing(tuple(Subject(item.id, here, item, canonical) for item in ready), name)


def _paired(decode: Subject, rest: Subject) -> Subject:
    """Return a routed pair: what the second declares and the first does, which serves decodes alone."""
    one, other = decode.candidate, rest.candidate
    if one.variant is None or other.variant is None:  # subjects have a manifest
        raise AssertionError
    ours, theirs = one.variant.supports, other.variant.supports
    common = {name: found if name == "phases" else _common(found, ours.get(name)) for name, found in theirs.items()}
    variant = evolve(
        other.variant,
        name=f"{one.variant.name}{_PAIR}{other.variant.name}",
        supports={name: found for name, found in common.items() if found is not None and name not in _NOT_OF_PAIRS},
        features=tuple(name for name in other.variant.features if name in one.variant.features),
        jit=other.variant.jit or one.variant.jit,
        emulates={**one.variant.emulates, **other.variant.emulates},
        rules=tuple(dict.fromkeys((*other.variant.rules, *one.variant.rules))),
    )
    name = f"{one.id}{_PAIR}{other.id}"
    distribution = " and ".join(dict.fromkeys((one.distribution, other.distribution)))
    installed = one.installed | other.installed
    merged = evolve(other, id=name, variant=variant, installed=installed, distribution=distribution)
    return Subject(name, rest.device, merged, rest.features)


def _common(one: Constraint, other: Constraint | None) -> Constraint | None:
    """Return what both declare of a field; None where that is nothing, so that the field is not declared."""
    met = None if other is None else one.intersect(other)
    return met if met is not None and met.alternatives else None


def _device(device: Device | str | None, named: Sequence[Candidate]) -> Device:
    """Return the device; a text may also be a device type that one of these candidates declares."""
    if device is None or isinstance(device, Device):
        return Device.current() if device is None else device
    declared = (item.supports("device_type") for item in named)
    return Device.parse(device, types=[name for each in declared if each is not None for name in each.members()])


def _unknown(name: str) -> UnknownBackendError:
    backend = name.partition("/")[0]
    broken = [item for item in _registered() if item.backend == backend and item.variant is None and item.reasons]
    if broken:
        return UnknownBackendError(
            f"the backend {name!r} cannot be tested",
            f"it is installed, and {broken[0].availability}: {'; '.join(map(str, broken[0].reasons))}",
            broken[0].fix or "see `attnplug check PATH` of its project",
        )
    names = list(installed())
    return UnknownBackendError(
        f"the backend {name!r} cannot be tested{near(name, names)}",
        f"installed are {', '.join(names) or 'none'}",
        "install it, or name one of these",
    )


def _canonical(features: Sequence[str]) -> tuple[str, ...]:
    domain = FIELDS["features"].domain
    try:
        names: tuple[str, ...] = domain.canonical(features)
    except ValueError:
        raise RequirementsError(
            f"the open features {features!r} were requested",
            "each is a dotted name, VENDOR.NAME",
            "write --attn-feature=vendor.name once for each, or features = ('vendor.name',) in the class",
        ) from None
    return names


def _listing(ready: tuple[Subject, ...], name: str) -> tuple[Subject, ...]:
    """Return the subjects that list every requested open feature."""
    listing = tuple(subject for subject in ready if set(subject.features) <= set(subject.open_features))
    if not listing:
        requested, known = ready[0].features, sorted({each for subject in ready for each in subject.open_features})
        unknown = next((each for each in requested if each not in known), "")
        raise RequirementsError(
            f"the backend {name!r} cannot be tested with features={requested}{near(unknown, known)}",
            "; ".join(f"{each.id} lists {', '.join(each.open_features) or 'no open feature'}" for each in ready),
            "request what a variant lists, or list the feature in the attnplug.toml of the variant",
        )
    return listing


def installed() -> tuple[str, ...]:
    """Return the names of what is installed, each as ``backend/variant``."""
    return tuple(sorted(item.id for item in _candidates()))


def _registered() -> list[Candidate]:
    found = registry().candidates()
    return [item for item in found if item.availability != "absent"]


def _candidates() -> list[Candidate]:
    return [item for item in _registered() if item.variant is not None]


def _installations(candidates: Iterable[Candidate]) -> Iterator[str]:
    """Yield how to install what each candidate is missing."""
    for item in candidates:
        if item.install or item.fix:
            yield f"{item.id}: {Fix(install=item.install, action=item.fix)}"


def _reasons(candidate: Candidate, device: Device) -> list[Reason]:
    """Return why a candidate cannot run on a device, whatever is requested."""
    facts = [fact for fact in device.facts().items() if fact[1] is not None]
    return [*candidate.reasons, *candidate.objections(facts)]
