"""The declared values that this device can reach, and a request for each of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.manifest import Holds, Range
from attnplug.request import FIELDS, Flag, Integer, Level, Names, Number
from attnplug_kit.conformance.request_spec import FP8_DTYPES, RequestSpec
from attnplug_kit.fields import OF_RECORDS, ROWS
from attnplug_kit.oracle.attention import REQUIRED, has_known_parameters
from attnplug_kit.oracle.rounding import RECORD, ROW_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.manifest import Constraint, Rule
    from attnplug.negotiation import Reason
    from attnplug_kit.conformance.subject import Subject

_LARGEST: Final = 1024
_FLOATS: Final = ("float32", "bfloat16", "float16")
_OPEN_FEATURE: Final = "its backend defines what an open feature means: test it beside the kit"
_REQUESTED_FEATURE: Final = f"every request has it, and it must not change attention; beyond that, {_OPEN_FEATURE}"


@frozen
class Capability:
    """
    One declared value.

    Attributes:
        field: The field.
        value: The value, as the requirements have it; ``"auto"`` for a cache of the layer's dtype.
    """

    field: str
    value: Any

    def __str__(self) -> str:
        return f"{self.field}={self.value}"


@frozen
class Unreached:
    """
    A declared value that no test exercises.

    Attributes:
        capability: The value.
        because: The reason.
    """

    capability: Capability
    because: str


@frozen(eq=False)
class FieldValues:
    """
    The declared values of one subject.

    Attributes:
        subject: The subject.
        specs: Each value that can be tested, with the plainest request that contains it.
        unreached: Those that this device, or the kit, cannot reach.
        unserved: Those that the manifest's own rules refuse in every request.
    """

    subject: Subject
    specs: Mapping[Capability, RequestSpec]
    unreached: tuple[Unreached, ...]
    unserved: tuple[Unreached, ...] = ()

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values that can be tested, by field."""
        found: dict[str, list[Any]] = {}
        for capability in self.specs:
            found.setdefault(capability.field, []).append(capability.value)
        return {name: tuple(values) for name, values in found.items()}

    def of(self, *names: str) -> dict[str, RequestSpec]:
        """Return the requests for the values of some fields, by the value as a text."""
        return {str(item): spec for item, spec in self.specs.items() if item.field in names}

    def spec(self, **fields: Any) -> RequestSpec | None:
        """Return the plainest request with these fields that is served, or None."""
        return next((spec for spec in _specs(self.subject, fields) if is_served(self.subject, spec)), None)

    def refusal(self, **fields: Any) -> tuple[Reason, ...]:
        """
        Return why no request with these fields is served: what the device refuses, else the reasons that name one of
        them, else those for the plainest request; nothing where that is served, or the kit has no batch for any.
        """
        requests = (spec.requirements() for spec in _specs(self.subject, fields))
        refusals = [self.subject.objections(requirements) for requirements in requests if requirements is not None]
        elsewhere = (reasons for reasons in refusals if reasons and all(map(_depends_on_the_device, reasons)))
        about = (reasons for reasons in refusals if any({*fields} & {*each.field.split(" and ")} for each in reasons))
        return next(elsewhere, next(about, refusals[0] if refusals else ()))


def is_served(subject: Subject, spec: RequestSpec) -> bool:
    """Whether the subject serves a request that is complete: a paged one has a block size."""
    requirements = spec.requirements()
    if requirements is not None and requirements.paged and requirements.block_size is None:
        return False
    return requirements is not None and not subject.objections(requirements)


@cache
def field_values_of(subject: Subject) -> FieldValues:
    """Return the declared values of a subject, from its manifest and the device alone."""
    specs: dict[Capability, RequestSpec] = {}
    unreached = [
        Unreached(Capability("features", name), _REQUESTED_FEATURE if name in subject.features else _OPEN_FEATURE)
        for name in subject.open_features
    ]
    unserved: list[Unreached] = []
    for capability in _declared(subject):
        because = _out_of_reach(subject, capability)
        spec = None if because else plainest(subject, capability)
        if spec is not None:
            specs[capability] = spec
            continue
        because, contradicts = (because, False) if because else _refusal(subject, capability)
        (unserved if contradicts else unreached).append(Unreached(capability, because))
    return FieldValues(subject, specs, tuple(unreached), tuple(unserved))


def _declared(subject: Subject) -> Iterator[Capability]:
    names = {*subject.supports, *(name for name, row in ROWS.items() if row.always)}
    for name in (item for item in FIELDS if item in names):
        constraint = subject.supports.get(name)
        if constraint is not None and FIELDS[name].kind == "device":
            yield from _of_devices(subject, name, constraint)
            continue
        values = ROWS[name].always if constraint is None or name == "paged" else _values(name, constraint)
        for value in values:
            if name != "paged" or not value or constraint is not None:
                yield Capability(name, value)


def _of_devices(subject: Subject, name: str, constraint: Constraint) -> Iterator[Capability]:
    """Yield this device's own value, and those of others that are listed by name."""
    here = subject.device.facts().get(name)
    domain = FIELDS[name].domain
    others = [value for value in constraint.choices() if here is None or not domain.allows(value, here)]
    for value in dict.fromkeys((*(() if here is None else (here,)), *others)):
        yield Capability(name, value)


def _values(name: str, constraint: Constraint) -> tuple[Any, ...]:
    """Return every value of a list; of ranges their ends, and some between."""
    domain = FIELDS[name].domain
    if name == "block_sparse":
        patterns = (*constraint.choices(), *map(domain.canonical, ROWS[name].samples))
        return tuple(dict.fromkeys(pattern for pattern in patterns if constraint.allows(pattern)))
    if isinstance(domain, (Integer, Number)):
        highest = [part.max for part in constraint.alternatives if isinstance(part, Range) and part.max is not None]
        samples = [value for value in ROWS[name].samples if constraint.allows(value)]
        found = (*constraint.choices(), *map(constraint.nearest, highest), *samples)
        return tuple(dict.fromkeys(value for value in found if value != FIELDS[name].neutral))
    if isinstance(domain, Names):
        return tuple(dict.fromkeys((item,) for choice in constraint.choices() for item in choice))
    if isinstance(domain, Level):
        return tuple(value for value in domain.values if value != FIELDS[name].neutral and constraint.allows(value))
    if isinstance(domain, Flag):
        return tuple(value for value in constraint.choices() if value != FIELDS[name].neutral)
    return tuple(value for value in constraint.choices() if value != FIELDS[name].neutral or name == "kv_cache_dtype")


def _out_of_reach(subject: Subject, capability: Capability) -> str:
    name, value = capability.field, capability.value
    if FIELDS[name].kind == "device":
        return "" if subject.device.facts().get(name) == value else f"the device is {subject.device}"
    if isinstance(FIELDS[name].domain, Integer) and value > _LARGEST and name != "topk":  # of few tokens
        return f"the kit requests sizes up to {_LARGEST}: the float64 oracle takes too long for larger ones"
    if name == "dtype" and value not in _FLOATS:
        return f"the kit has no tolerance for {value}"
    if name == "kv_cache_dtype" and value not in ("auto", *FP8_DTYPES, RECORD, *ROW_DTYPES):
        return f"the oracle rounds to {', '.join((*FP8_DTYPES, RECORD, *ROW_DTYPES))} only"
    if name == "block_sparse" and not has_known_parameters(dict(value)):
        return f"the oracle has patterns of {', '.join(REQUIRED)}, homo_head and homo_head_group only"
    return ROWS[name].unreachable


def plainest(subject: Subject, capability: Capability) -> RequestSpec | None:
    """Return the plainest request with a value that is served, or None."""
    fields = {} if FIELDS[capability.field].kind == "device" else {capability.field: capability.value}
    served = (spec for spec in _specs(subject, fields) if is_served(subject, spec))
    if capability.field != "head_size_v":
        return next(served, None)
    # Values as large as keys show nothing about values of this size; they are what is left where no other are served.
    first = next(served, None)
    return next((one for one in (first, *served) if one and one.fields["head_size"] != capability.value), first)


def _specs(subject: Subject, fields: Mapping[str, Any]) -> Iterator[RequestSpec]:
    """Yield plain requests with these fields, then with fields that rules require, then with one more feature."""
    yield from _plain_specs(subject, fields)
    needed = _needed(subject, fields)
    if needed:
        yield from _plain_specs(subject, {**needed, **fields})
    if "block_sparse" in subject.supports and "block_sparse" not in fields:  # a backend may serve patterns only
        for pattern in _values("block_sparse", subject.supports["block_sparse"]):
            yield from _plain_specs(subject, {**needed, **fields, "block_sparse": pattern})
    if "latent" in subject.supports and "latent" not in fields:  # likewise
        yield from _plain_specs(subject, {**_needed(subject, {**fields, "latent": True}), **fields, "latent": True})
    if "topk" in subject.supports and "topk" not in fields:  # likewise
        own = {**fields, "latent": True, "topk": _values("topk", subject.supports["topk"])[0]}
        yield from _plain_specs(subject, {**_needed(subject, own), **own})
    for name in ("kv_cache_dtype", "attn_type", "return_lse", "causal", "phases"):
        for value in _values(name, subject.supports[name]) if name in subject.supports and name not in fields else ():
            yield from _plain_specs(subject, {**fields, name: value})


def _needed(subject: Subject, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rules about these fields require of others, as far as it is a value."""
    rules = subject.candidate.variant.rules if subject.candidate.variant else ()
    about = [rule for rule in rules if _is_about(rule, fields)]
    needs = [condition for rule in about for condition in rule.need if condition.field in FIELDS]
    return {
        need.field: need.constraint.first()
        for need in needs
        if isinstance(need, Holds) and FIELDS[need.field].kind != "device" and need.field != "num_q_heads"
    }


def _is_about(rule: Rule, fields: Mapping[str, Any]) -> bool:
    """Whether a rule names one of these fields, and none of them with another value."""
    named = [condition for condition in rule.when if condition.field in fields]
    return bool(named) and all(not isinstance(c, Holds) or c.constraint.allows(fields[c.field]) for c in named)


def _plain_specs(subject: Subject, fields: Mapping[str, Any]) -> Iterator[RequestSpec]:
    if fields.get("kv_cache_dtype") == RECORD:
        fields = {**OF_RECORDS, **fields}
    heads = subject.supports.get("num_kv_heads")
    groups, query_heads = 2 if heads is None else heads.nearest(2), subject.supports.get("num_q_heads")
    ratio = 2 if query_heads is None else max(1, query_heads.nearest(2 * groups) // groups)
    common = {"num_kv_heads": groups, "gqa_ratio": ratio}
    if subject.features:
        common["features"] = subject.features
    dtypes = [name for name in _FLOATS if subject.supports["dtype"].allows(name)]
    for paged in (True, False):
        for dtype in dtypes:
            for size in _head_sizes(subject, fields):
                latents = _latent_size(subject, size) if fields.get("latent") else None
                for blocks in _preferred(subject, "block_size") if paged else (None,):
                    own = {"paged": paged, "dtype": dtype, "head_size": size, "block_size": blocks}
                    if fields.get("latent"):
                        own |= {"num_kv_heads": 1, "head_size_v": latents}
                    yield RequestSpec.of({**common, **own, **fields}, fields)
                    if own.get("head_size_v"):  # without rotary elements
                        yield RequestSpec.of({**common, **own, "head_size_v": None, **fields}, fields)


def _head_sizes(subject: Subject, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return sizes of keys, and for values of a size keys half as large again: those of uncompressed latents."""
    found, size_v = _preferred(subject, "head_size"), fields.get("head_size_v")
    return found if size_v is None else (*found, subject.supports["head_size"].nearest(size_v * 3 // 2))


def _latent_size(subject: Subject, size: int) -> int | None:
    """Return a size of latents for which keys of a size have rotary elements; None where no value may be shorter."""
    declared = subject.supports.get("head_size_v")
    sizes = () if declared is None else (one for one in range(size - 1, 0, -1) if declared.allows(one))
    return min(sizes, key=lambda one: abs(one - size * 3 // 4), default=None)


def _preferred(subject: Subject, name: str) -> tuple[Any, ...]:
    """Return values in the order in which they suit a small batch."""
    constraint = subject.supports.get(name)
    if constraint is None:
        return (None,)
    return tuple(dict.fromkeys((constraint.nearest(16), *_values(name, constraint))))


def _refusal(subject: Subject, capability: Capability) -> tuple[str, bool]:
    """Return why no request with a value is served, and whether the manifest contradicts itself."""
    # It does where it declares the value, and its rules refuse it whatever the device and the installed versions.
    reasons = FieldValues(subject, {}, ()).refusal(**{capability.field: capability.value})
    if not reasons:
        return "the kit has no batch for it", False
    elsewhere = all(map(_depends_on_the_device, reasons))
    is_declared = capability.field in subject.supports and capability.value != FIELDS[capability.field].neutral
    # A manifest that declares no form has one for keys and values apart, which a backend for latents alone never uses.
    is_default = str(capability) == "kv_cache_form=joint" and "latent" in subject.supports
    # What both of a routed pair declare, and may not agree on, is no contradiction: each is tested alone, too.
    return "; ".join(map(str, reasons)), is_declared and not (elsewhere or is_default or subject.is_pair)


def _depends_on_the_device(reason: Reason) -> bool:
    """Whether the request would be served on another device, or with other versions."""
    names = reason.field.split(" and ")
    return any(name not in FIELDS or FIELDS[name].kind == "device" for name in names)
