"""The conditions of rules and preferences: `when = {...}` and `need = {...}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.manifest.installed import check_requirement
from attnplug.manifest.schema import Condition, Holds, IsAsked, IsInstalled
from attnplug.manifest.supports import Fail, Path, parse_constraint
from attnplug.request.domain import Flag
from attnplug.request.fields import FIELDS, near

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse_conditions(fail: Fail, table: Mapping[str, Any], where: Path) -> tuple[Condition, ...]:
    """
    Read a table of conditions, all of which have to hold.

    A truth value for a field that is not a flag asks whether the field is asked for: ``{ sliding_window = false
    }`` is "no window". ``installed`` takes PEP 508
    requirements.

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
                where, f"{name} = {value}", f"{name} is always asked for", "give the values that the rule is about"
            )
        return IsAsked(name, value)
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
