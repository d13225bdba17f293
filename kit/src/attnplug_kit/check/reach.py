"""
Which values a field can have for a variant, and whether conditions can hold.

Every variant serves the neutral value of a field, which requests nothing. The functions are conservative: where a field
can have any value, or two fields depend on each other, a condition can hold, and does not always.
"""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final

from packaging.utils import canonicalize_name

from attnplug.errors import RequirementsError
from attnplug.manifest import Alternative, Constraint, Exact, Holds, IsInstalled, IsRequested, Range
from attnplug.request import FIELDS, Flag, Integer, Names, Requirements, Table
from attnplug_kit.check.requires import contradict, follows, parsed
from attnplug_kit.fields import OF_RECORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.manifest import Condition, Variant


_MOST_MEMBERS: Final = 4096
_MOST_COMBINATIONS: Final = 512
_PLAIN: Final = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 8, "dtype": "bfloat16"}
_INDEPENDENT: Final = ("num_q_heads", "num_kv_heads", "gqa_ratio", "features", "phases")
"""Fields whose values contradict no others."""

_ANYTHING: Final = ("vendor", "features", "phases")
"""Fields that are not analyzed: undeclared, more than one of their values is served."""


def can_hold(condition: Condition, variant: Variant) -> bool:
    """Whether a condition holds for some request that the variant declares."""
    if isinstance(condition, IsInstalled):
        return any(_can_be_installed(text, variant) for text in condition.requirements)
    if isinstance(condition, IsRequested):
        return not condition.requested or _can_be_requested(condition.field, variant)
    values = values_of(condition.field, variant)
    return values is None or bool(condition.constraint.intersect(values).alternatives)


def always_holds(condition: Condition, variant: Variant, *, absent: bool = False) -> bool:
    """Whether a condition holds for every request that the variant declares; `absent` as for `Holds.holds`."""
    if isinstance(condition, IsInstalled):
        return any(_is_always_installed(text, variant) for text in condition.requirements)
    if isinstance(condition, IsRequested):
        return not condition.requested and not _can_be_requested(condition.field, variant)
    values = values_of(condition.field, variant)
    if values is None or isinstance(values.domain, Names) or (_may_be_absent(condition.field, variant) and not absent):
        return False
    return all(_covers(condition.constraint, alternative) for alternative in values.alternatives)


def can_be_met(condition: Condition, variant: Variant) -> bool:
    """Whether a condition of a `need` holds for some request; a field without a value meets it."""
    absent = isinstance(condition, Holds) and _may_be_absent(condition.field, variant)
    return absent or can_hold(condition, variant)


def exhausted(conditions: Iterable[Condition], variant: Variant) -> str:
    """Return the first field that has no value which meets all of these conditions, or an empty text."""
    left: dict[str, Constraint | None] = {}
    for condition in conditions:
        name = condition.field
        if not can_be_met(condition, variant):
            return name
        if isinstance(condition, Holds) and not _may_be_absent(name, variant):
            values = left.get(name, values_of(name, variant))
            left[name] = condition.constraint if values is None else values.intersect(condition.constraint)
    return next((name for name, values in left.items() if values is not None and not values.alternatives), "")


def values_of(name: str, variant: Variant) -> Constraint | None:
    """Return the values that a field can have for a variant, or None for any."""
    item = FIELDS[name]
    declared = variant.supports.get(name)
    if name in _ANYTHING or (declared is None and item.open):
        return None
    listed = [a for a in declared.alternatives if a != Exact("auto")] if declared else []
    return Constraint(item.domain, tuple(dict.fromkeys((*listed, *_neutral(name, variant)))))


def _neutral(name: str, variant: Variant) -> tuple[Alternative, ...]:
    """Return the values that request nothing."""
    item = FIELDS[name]
    if item.follows is not None and not item.follows.requests:
        if isinstance(item.domain, Flag):
            return Exact(value=True), Exact(value=False)
        source = variant.supports.get(item.follows.names[0])
        return source.alternatives if source else ()
    return () if item.neutral is None or item.required else (Exact(item.neutral),)


def _can_be_requested(name: str, variant: Variant) -> bool:
    item = FIELDS[name]
    if item.free:  # the negotiation chooses it
        return False
    return item.open or name in _ANYTHING or name in variant.supports


def _may_be_absent(name: str, variant: Variant) -> bool:
    item = FIELDS[name]
    if name == "compute_capability":
        types = variant.supports.get("device_type")
        return types is None or types.alternatives != (Exact("cuda"),)
    return not (item.required or item.follows or item.kind == "derived") and item.neutral is None


def _covers(constraint: Constraint, part: Alternative) -> bool:
    if isinstance(part, Exact):
        return constraint.allows(part.value)
    domain = constraint.domain
    low = part.min if part.min is not None else getattr(domain, "min", None)
    if isinstance(domain, Integer) and part.max is not None and part.max <= _MOST_MEMBERS:
        return all(map(constraint.allows, Constraint(domain, (part,)).members(_MOST_MEMBERS)))
    return any(_contains(domain, a, low, part) for a in constraint.alternatives if isinstance(a, Range))


def _contains(domain: Any, outer: Range, low: Any, inner: Range) -> bool:
    starts = outer.min is None or (low is not None and domain.rank(outer.min) <= domain.rank(low))
    ends = outer.max is None or (inner.max is not None and domain.rank(inner.max) <= domain.rank(outer.max))
    steps = outer.multiple_of is None or (inner.multiple_of or 1) % outer.multiple_of == 0
    return starts and ends and steps


def _can_be_installed(text: str, variant: Variant) -> bool:
    requirement = parsed(text)
    return requirement is None or not contradict([requirement, *_required(requirement.name, variant)])


def _is_always_installed(text: str, variant: Variant) -> bool:
    requirement = parsed(text)
    return requirement is not None and follows(_required(requirement.name, variant), requirement)


def _required(name: str, variant: Variant) -> list[Any]:
    """Return what a variant requires of a distribution on every platform."""
    found = filter(None, map(parsed, variant.requires))
    return [each for each in found if canonicalize_name(each.name) == canonicalize_name(name) and each.marker is None]


def contradiction(when: Sequence[Condition]) -> str:
    """
    Return why no requirements meet these conditions, or an empty text.

    Only values of fields that can contradict each other are tried. Of too many combinations nothing is concluded.
    """
    fields = {c.field: tuple(_values(c)) for c in when if _is_tried(c)}
    combinations = product(*fields.values())
    why = ""
    for number, values in enumerate(islice(combinations, _MOST_COMBINATIONS + 1)):
        try:
            Requirements(**{**_PLAIN, **_needed_by(fields), **dict(zip(fields, values, strict=True))})
        except RequirementsError as error:
            why = f"{error.problem.removesuffix(' were given')} contradict each other: {error.expected}"
        else:
            return ""
        if number == _MOST_COMBINATIONS:
            return ""
    return why


def _is_tried(condition: Condition) -> bool:
    item = FIELDS.get(condition.field)
    return item is not None and item.kind in ("model", "engine") and condition.field not in _INDEPENDENT


def _needed_by(fields: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return other fields that the values need."""
    dtypes = [value for value in fields.get("kv_cache_dtype", ()) if value in ("float32", "float16", "bfloat16")]
    needed: dict[str, Any] = {"dtype": dtypes[0]} if dtypes else {}
    is_sparse = any(value is not None for value in fields.get("topk", ()))
    if True in fields.get("latent", ()) or is_sparse:
        needed |= {"latent": True, "num_kv_heads": 1, "head_size": 1024}
    has_records = set(fields.get("kv_cache_dtype", ())) == {OF_RECORDS["kv_cache_dtype"]}
    return {**needed, **(OF_RECORDS if has_records else {})}


def _values(condition: Condition) -> Iterator[Any]:
    item = FIELDS[condition.field]
    if isinstance(condition, IsRequested) and not condition.requested:
        yield from () if item.neutral is None and item.required else (item.neutral,)
    elif isinstance(condition, Holds):
        yield from condition.constraint.choices()
    elif isinstance(item.domain, Flag):
        yield not item.neutral
    elif isinstance(item.domain, (Names, Table)):
        yield from ({"stride": 1},) if isinstance(item.domain, Table) else ()
    else:
        yield from _others(condition.field, item.neutral)


def _others(name: str, neutral: Any) -> Iterator[Any]:
    """Yield values of a field that request something."""
    values = getattr(FIELDS[name].domain, "values", None)
    yield from (value for value in values or (2, 3) if value not in (neutral, "auto"))
