"""What a backend declares and this device can reach: the values that the kit asks for, and how to ask for each."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.manifest import Holds, Range
from attnplug.request import FIELDS, Flag, Integer, Level, Names, Number
from attnplug_kit.conformance.request_spec import NARROW, RequestSpec
from attnplug_kit.oracle.byte_rounding import BYTES
from attnplug_kit.oracle.sparsity import NEEDED, is_known

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.manifest import Constraint
    from attnplug.negotiation import Reason
    from attnplug_kit.conformance.subject import Subject

_SAMPLES: Final[dict[str, tuple[Any, ...]]] = {
    "head_size": (64, 128, 80, 40),
    "head_size_v": (24, 128),
    "num_kv_heads": (2, 1),
    "block_size": (16, 1, 12),
    "sliding_window": (7, 1, 64),
    "attention_chunk": (16, 5),
    "logits_soft_cap": (2.0, 30.0),
    "decode_query_len": (2, 5),
}
_LARGEST: Final = 1024
_FLOATS: Final = ("float32", "bfloat16", "float16")
_ELSEWHERE: Final[dict[str, str]] = {
    "dcp_size": "the kit runs in one process, and a spread cache needs several ranks",
    "output_quant": "the oracle's outputs are not quantized",
}
_PATTERNS: Final[tuple[dict[str, Any], ...]] = (
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 1, "vert_stride": 3},
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 0, "vert_stride": 2},
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 2, "vert_stride": 3, "homo_head": True},
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 1, "vert_stride": 4, "homo_head_group": True},
    {"max_seqlen": 4096, "block_size": 64, "local_blocks": 2, "vert_stride": 8},
)
_ALWAYS: Final = {"gqa_ratio": (1, 2, 4, 7, 8), "num_kv_heads": (2,), "paged": (True, False)}


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
    A declared value that is not exercised here.

    Attributes:
        capability: The value.
        because: Why not.
    """

    capability: Capability
    because: str


@frozen(eq=False)
class Menu:
    """
    All that can be asked of one subject.

    Attributes:
        subject: The subject.
        asks: Each reachable value, and the plainest ask that contains it.
        unreached: Those that this device, or the kit, cannot reach, with the reason.
        unserved: Those that the manifest declares, and refuses by its own rules in every request, with the refusal.
    """

    subject: Subject
    asks: Mapping[Capability, RequestSpec]
    unreached: tuple[Unreached, ...]
    unserved: tuple[Unreached, ...] = ()

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the reachable values by field."""
        found: dict[str, list[Any]] = {}
        for capability in self.asks:
            found.setdefault(capability.field, []).append(capability.value)
        return {name: tuple(values) for name, values in found.items()}

    def ask(self, **fields: Any) -> RequestSpec | None:
        """Return the plainest ask with these fields that is served, or None."""
        return next((ask for ask in _asks(self.subject, fields) if is_served(self.subject, ask)), None)

    def refusal(self) -> str:
        """Return why the plainest request is refused, or an empty text where it is not."""
        asked = (ask.requirements() for ask in _asks(self.subject, {}))
        plainest = next(requirements for requirements in asked if requirements is not None)
        return "; ".join(map(str, self.subject.objections(plainest)))


def is_served(subject: Subject, ask: RequestSpec) -> bool:
    """Whether the subject serves an ask that makes sense: one with pages says how large they are."""
    requirements = ask.requirements()
    if requirements is not None and requirements.paged and requirements.block_size is None:
        return False
    return requirements is not None and not subject.objections(requirements)


@cache
def field_values_of(subject: Subject) -> Menu:
    """Return the menu of a subject, from its manifest and the device alone."""
    asks: dict[Capability, RequestSpec] = {}
    unreached = [
        Unreached(Capability("features", name), _ASKED if name in subject.features else _OWN)
        for name in subject.open_features
    ]
    unserved: list[Unreached] = []
    for capability in _declared(subject):
        because = _out_of_reach(subject, capability)
        ask = None if because else _plainest(subject, capability)
        if ask is not None:
            asks[capability] = ask
            continue
        because, contradicts = (because, False) if because else _refusal(subject, capability)
        (unserved if contradicts else unreached).append(Unreached(capability, because))
    return Menu(subject, asks, tuple(unreached), tuple(unserved))


_OWN: Final = "an open feature means what its backend says: test it beside the kit"
_ASKED: Final = f"every request asks for it, and attention stays what it is; beside that, {_OWN}"


def _declared(subject: Subject) -> Iterator[Capability]:
    names = dict.fromkeys((*subject.supports, *_ALWAYS))
    for name in (item for item in FIELDS if item in names):
        constraint = subject.supports.get(name)
        if constraint is not None and FIELDS[name].kind == "device":
            yield from _of_devices(subject, name, constraint)
            continue
        values = _ALWAYS.get(name, ()) if constraint is None or name == "paged" else _values(name, constraint)
        for value in values:
            if name != "paged" or not value or constraint is not None:
                yield Capability(name, value)


def _of_devices(subject: Subject, name: str, constraint: Constraint) -> Iterator[Capability]:
    """This device's own value, and those of others that are listed by name."""
    here = subject.device.facts().get(name)
    domain = FIELDS[name].domain
    others = [value for value in constraint.choices() if here is None or not domain.allows(value, here)]
    for value in dict.fromkeys((*(() if here is None else (here,)), *others)):
        yield Capability(name, value)


def _values(name: str, constraint: Constraint) -> tuple[Any, ...]:
    """Every value of a list; of ranges their ends, and some between."""
    domain = FIELDS[name].domain
    if name == "block_sparse":
        patterns = (*constraint.choices(), *map(domain.canonical, _PATTERNS))
        return tuple(dict.fromkeys(pattern for pattern in patterns if constraint.allows(pattern)))
    if isinstance(domain, (Integer, Number)):
        highest = [part.max for part in constraint.alternatives if isinstance(part, Range) and part.max is not None]
        samples = [value for value in _SAMPLES.get(name, ()) if constraint.allows(value)]
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
        return "" if subject.device.facts().get(name) == value else f"this is {subject.device}"
    if isinstance(FIELDS[name].domain, Integer) and value > _LARGEST:
        return f"the kit asks for sizes up to {_LARGEST}: larger ones take the float64 oracle too long"
    if name == "dtype" and value not in _FLOATS:
        return f"the kit states no tolerance for {value}"
    if name == "kv_cache_dtype" and value not in ("auto", *NARROW, *BYTES):
        return f"the oracle rounds to {', '.join((*NARROW, *BYTES))} alone"
    if name == "block_sparse" and not is_known(dict(value)):
        return f"the oracle knows patterns of {', '.join(NEEDED)} alone, and what slides from head to head"
    return _ELSEWHERE.get(name, "")


def _plainest(subject: Subject, capability: Capability) -> RequestSpec | None:
    fields = {} if FIELDS[capability.field].kind == "device" else {capability.field: capability.value}
    return next((ask for ask in _asks(subject, fields) if is_served(subject, ask)), None)


def _asks(subject: Subject, fields: Mapping[str, Any]) -> Iterator[RequestSpec]:
    """Yield plain asks with these fields, then ones with what rules need beside them, then with one more feature."""
    yield from _plain_asks(subject, fields)
    needed = _needed(subject, fields)
    if needed:
        yield from _plain_asks(subject, {**needed, **fields})
    if "block_sparse" in subject.supports and "block_sparse" not in fields:  # there may be nothing without a pattern
        for pattern in _values("block_sparse", subject.supports["block_sparse"]):
            yield from _plain_asks(subject, {**needed, **fields, "block_sparse": pattern})
    for name in ("kv_cache_dtype", "attn_type", "return_lse", "causal", "phases"):
        for value in _values(name, subject.supports[name]) if name in subject.supports and name not in fields else ():
            yield from _plain_asks(subject, {**fields, name: value})


def _needed(subject: Subject, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the rules about these fields need of others, as far as a value can be told."""
    rules = subject.candidate.variant.rules if subject.candidate.variant else ()
    about = [rule for rule in rules if any(condition.field in fields for condition in rule.when)]
    needs = [condition for rule in about for condition in rule.need if condition.field in FIELDS]
    return {
        need.field: need.constraint.first()
        for need in needs
        if isinstance(need, Holds) and FIELDS[need.field].kind != "device" and need.field != "num_q_heads"
    }


def _plain_asks(subject: Subject, fields: Mapping[str, Any]) -> Iterator[RequestSpec]:
    dtypes = [name for name in _FLOATS if subject.supports["dtype"].allows(name)]
    sizes = _preferred(subject, "head_size")
    for paged in (True, False):
        for dtype in dtypes:
            for size in sizes:
                for blocks in _preferred(subject, "block_size") if paged else (None,):
                    yield RequestSpec.of(
                        {
                            **_plain(subject),
                            "paged": paged,
                            "dtype": dtype,
                            "head_size": size,
                            "block_size": blocks,
                            **fields,
                        }
                    )


def _plain(subject: Subject) -> dict[str, Any]:
    heads = subject.supports.get("num_kv_heads")
    features = subject.features or None
    return {"num_kv_heads": 2 if heads is None else heads.nearest(2), "gqa_ratio": 2, "features": features}


def _preferred(subject: Subject, name: str) -> tuple[Any, ...]:
    """Values in the order of how well they suit a small batch."""
    constraint = subject.supports.get(name)
    if constraint is None:
        return (None,)
    return tuple(dict.fromkeys((constraint.nearest(16), *_values(name, constraint))))


def _refusal(subject: Subject, capability: Capability) -> tuple[str, bool]:
    """
    Why no ask for a value is served, and whether the manifest contradicts itself: it declares the value, and its rules
    refuse it whatever the device and the versions of what is installed.
    """
    asked = (ask.requirements() for ask in _asks(subject, {capability.field: capability.value}))
    refusals = [subject.objections(requirements) for requirements in asked if requirements is not None]
    if not refusals:
        return "no batch of the kit asks for it", False
    elsewhere = [reasons for reasons in refusals if reasons and all(map(_is_about_here, reasons))]
    reasons = elsewhere[0] if elsewhere else refusals[0]
    is_declared = capability.field in subject.supports and capability.value != FIELDS[capability.field].neutral
    return "; ".join(map(str, reasons)), is_declared and not elsewhere


def _is_about_here(reason: Reason) -> bool:
    """Whether another device, or other versions, could lift a refusal."""
    names = reason.field.split(" and ")
    return any(name not in FIELDS or FIELDS[name].kind == "device" for name in names)
