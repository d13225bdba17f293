"""What a variant declares: the `supports` tables, read to one constraint for each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from attnplug.errors import ManifestError, near
from attnplug.manifest.constraint import Alternative, Constraint, Exact, Range
from attnplug.manifest.installed import check_requirement
from attnplug.manifest.schema import Condition, Holds, IsInstalled, IsRequested
from attnplug.request.domains import LATENT, Flag, Integer, Name, Names, Table
from attnplug.request.fields import FIELDS, fields_of

if TYPE_CHECKING:
    from attnplug.request.field import Field

Fail = Callable[[tuple["str | int", ...], str, str, str], ManifestError]
Path = tuple["str | int", ...]

DECLARABLE = tuple(item.name for item in fields_of("model", "engine", "device") if item.name != "features")
MUST_DECLARE = tuple(name for name in DECLARABLE if FIELDS[name].required and not FIELDS[name].open)
OPTIONAL = tuple(name for name in DECLARABLE if not FIELDS[name].required)
_BOUNDS = ("min", "max", "multiple_of")


@frozen
class Declared:
    """
    One `supports` table, read.

    Attributes:
        fields: The constraint of each field that it declares or lists as a feature.
        features: The open features that it lists.
    """

    fields: Mapping[str, Constraint]
    features: tuple[str, ...] = ()

    def under(self, own: Declared) -> Declared:
        """Return this table with a variant's own on top: a field replaces the shared one, features add to them."""
        return Declared({**self.fields, **own.fields}, tuple(dict.fromkeys((*self.features, *own.features))))


def parse_supports(fail: Fail, table: Any, where: Path, *, newer: bool) -> Declared:
    """
    Read one table.

    Args:
        fail: Makes the error for a place in the file.
        table: The table.
        where: Its place in the file.
        newer: Whether the manifest is of a newer minor version of the contract. Fields that this core does not know
            are ignored then: no request of this core has them.

    Raises:
        ManifestError: A field is unknown, or a value is outside its domain.
    """
    if not isinstance(table, Mapping):
        raise fail(where, f"supports = {table!r}", "supports is a table of fields", "write supports = { ... }")
    listed = _features(fail, table.get("features", []), (*where, "features"), newer=newer)
    anything = {name: _anything(FIELDS[name]) for name in listed if name in FIELDS}
    # A field that is listed as a feature and declared with values has those values.
    return Declared(
        anything | _fields(fail, table, where, newer=newer), tuple(name for name in listed if name not in FIELDS)
    )


def complete(fail: Fail, declared: Declared, where: Path) -> Declared:
    """
    Check that a variant declares what every variant has to, and fill in what follows.

    Raises:
        ManifestError: A field that must be declared is missing.
    """
    for name in MUST_DECLARE:
        if name not in declared.fields:
            raise fail(
                where,
                f"no {name!r} in supports",
                f"every variant declares {', '.join(MUST_DECLARE)}",
                f"declare {name}",
            )
    if "paged" in declared.fields:
        return evolve(declared, fields=_complete_cache(fail, declared.fields, where))
    return declared


_CACHE_DEFAULTS: Final = {
    name: Constraint(FIELDS[name].domain, (Exact(value),))
    for name, value in (("kv_layout", "NHD"), ("kv_cache_form", "joint"))
}


def _complete_cache(fail: Fail, found: Mapping[str, Constraint], where: Path) -> Mapping[str, Constraint]:
    """
    Complete the declaration of a paged KV cache. Its block size only the author knows; by default its layout is NHD,
    tokens before heads, and its form joint, all keys before all values.
    """
    if "block_size" not in found:
        raise fail(
            where,
            "paged without block_size in supports",
            "a paged KV cache has blocks of a supported size",
            "declare block_size",
        )
    if "kv_cache_form" in found and found["kv_cache_form"].allows(LATENT):
        raise fail(
            (*where, "kv_cache_form"),
            f"{LATENT!r} in kv_cache_form",
            "that form is for latent requests alone: a variant that supports `latent` supports it",
            "remove it, and list 'latent' in features",
        )
    return {**_CACHE_DEFAULTS, **found}


def parse_constraint(fail: Fail, item: Field, value: Any, where: Path) -> Constraint:
    """
    Read a value, a range table, or an ordered list of those.

    Raises:
        ManifestError: A value is outside the field's domain, or a range cannot be one.
    """
    parts = value if isinstance(value, list) else [value]
    if not parts:
        raise fail(
            where,
            f"{item.name} = []",
            "a list of alternatives has at least one",
            "list what is supported, or remove the field",
        )
    return Constraint(item.domain, tuple(_alternative(fail, item, part, where) for part in parts))


def _fields(fail: Fail, table: Mapping[str, Any], where: Path, *, newer: bool) -> dict[str, Constraint]:
    declared = {}
    for name, value in table.items():
        if name in DECLARABLE:
            declared[name] = parse_constraint(fail, FIELDS[name], value, (*where, name))
        elif name != "features" and not newer:
            raise fail(
                (*where, name),
                f"the field {name!r} in supports{near(name, DECLARABLE)}",
                f"the fields are {', '.join(DECLARABLE)}, features",
                "correct the name",
            )
    return declared


def _features(fail: Fail, value: Any, where: Path, *, newer: bool) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise fail(
            where, f"features = {value!r}", "features is a list of names", 'write features = ["sliding_window", ...]'
        )
    known = [name for name in value if name in OPTIONAL or "." in name]
    for name in value:
        if name not in known and (not newer or name in FIELDS):
            allowed = f"a feature is an optional field ({', '.join(OPTIONAL)}) or an open name with a dot"
            raise fail((*where, name), f"the feature {name!r}{near(name, OPTIONAL)}", allowed, "correct the name")
    return known


def _anything(item: Field) -> Constraint:
    """
    Return the constraint that every value of the field meets; closed lists of names are spelled out, so that they
    have a first choice.
    """
    if isinstance(item.domain, Flag):
        return Constraint(item.domain, tuple(Exact(value) for value in (True, False)))
    if isinstance(item.domain, Names):
        return Constraint(item.domain, (Exact(item.domain.each.values),))
    if isinstance(item.domain, Name) and not item.domain.open:
        return Constraint(item.domain, tuple(Exact(name) for name in item.domain.values if name != LATENT))
    return Constraint(item.domain, (Range(),))


def _alternative(fail: Fail, item: Field, value: Any, where: Path) -> Alternative:
    if isinstance(value, Mapping) and not isinstance(item.domain, Table):
        return _range(fail, item, value, where)
    try:
        return Exact(item.domain.canonical([value] if isinstance(item.domain, Names) else value))
    except (ValueError, OverflowError) as error:  # the second: a whole number beyond every float
        raise fail(
            where, f"{item.name} = {value!r}", f"{item.name} ({item.help}) is {error}", "correct the value"
        ) from None


def _range(fail: Fail, item: Field, table: Mapping[str, Any], where: Path) -> Range:
    for key in table:
        if key not in _BOUNDS:
            raise fail(
                (*where, key),
                f"{key!r} in the range of {item.name}{near(key, _BOUNDS)}",
                "a range has min, max and multiple_of",
                "correct the key",
            )
    try:
        low, high = (item.domain.canonical(table[key]) if key in table else None for key in ("min", "max"))
    except (ValueError, OverflowError) as error:
        raise fail(where, f"{item.name} = {dict(table)!r}", f"a bound is {error}", "correct the bound") from None
    step = table.get("multiple_of")
    _check_range(fail, item, (low, high, step), where)
    return Range(low, high, step)


def _check_range(fail: Fail, item: Field, bounds: tuple[Any, Any, Any], where: Path) -> None:
    low, high, step = bounds
    text = f"{item.name} from {low} to {high} in multiples of {step}"
    if low is None and high is None and step is None:
        raise fail(
            where,
            f"{item.name} = {{}}",
            "a range has min, max or multiple_of",
            "give one of them; for any value list the field in features",
        )
    if step is not None and (type(step) is not int or step < 1 or not isinstance(item.domain, Integer)):
        raise fail(where, text, "multiple_of is a whole number from 1 on, for whole numbers only", "correct it")
    ranked = [item.domain.rank(bound) for bound in (low, high) if bound is not None]
    if None in ranked:
        raise fail(where, text, f"{item.name} has no order", "list its values")
    if Constraint(item.domain, (Range(low, high, step),)).first() is None:
        raise fail(where, text, "a range contains at least one value", "correct the bounds")


def parse_conditions(fail: Fail, table: Mapping[str, Any], where: Path) -> tuple[Condition, ...]:
    """
    Read a table of conditions, all of which have to hold.

    A boolean for a field that is not a flag is about whether the field is requested: ``{ sliding_window = false }`` is
    "no window". ``installed`` takes PEP 508 requirements.

    Raises:
        ManifestError: A field is unknown or a value is outside its domain.
    """
    return tuple(_condition(fail, name, value, (*where, name)) for name, value in table.items())


def _condition(fail: Fail, name: str, value: Any, where: Path) -> Condition:
    if name == "installed":
        return _installed(fail, value, where)
    if name not in FIELDS:
        known = (*FIELDS, "installed")
        raise fail(
            where,
            f"the condition {name!r}{near(name, known)}",
            f"a condition is about {', '.join(known)}",
            "correct the name",
        )
    item = FIELDS[name]
    if isinstance(value, bool) and not isinstance(item.domain, Flag):
        if item.required or item.kind == "derived":
            raise fail(
                where, f"{name} = {value}", f"{name} is always requested", "give the values that the rule is about"
            )
        return IsRequested(name, value)
    return Holds(name, parse_constraint(fail, item, value, where))


def _installed(fail: Fail, value: Any, where: Path) -> IsInstalled:
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise fail(where, "installed = []", "it is a PEP 508 requirement or a list of them", "name a distribution")
    for text in texts:
        problem = check_requirement(text) if isinstance(text, str) else "it is not a text"
        if problem:
            raise fail(
                where,
                f"installed = {text!r}",
                f"it is a PEP 508 requirement: {problem}",
                'write, for example, "flash-attn <2.8"',
            )
    return IsInstalled(tuple(texts))
