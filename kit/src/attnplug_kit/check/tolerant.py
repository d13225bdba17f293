"""Reads a manifest beyond its first mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from attrs import evolve, field, frozen

from attnplug.errors import ApiVersionError, ManifestError
from attnplug.manifest import (
    CONTRACT_API,
    MUST_DECLARE,
    Condition,
    Constraint,
    Declared,
    Option,
    Reader,
    Rule,
    Variant,
    parse_conditions,
)
from attnplug.request import FIELDS
from attnplug_kit.check.report import Finding

_T = TypeVar("_T")
_UNREADABLE: Final = "unreadable"
_Path = tuple["str | int", ...]


@frozen
class TolerantReader(Reader):
    """
    Reads as a `Reader` does, and collects findings instead of raising the first error.

    The manifest that it returns is without the mistakes, so that each of them is reported once.

    Attributes:
        findings: The findings so far.
        formless: Places of values of the wrong form, about which there are no further findings.
    """

    findings: list[Finding] = field(factory=list)
    formless: set[_Path] = field(factory=set)

    def keep(self, error: ManifestError) -> None:
        """Keep an error as a finding, once."""
        found = Finding.of(error)
        if found not in self.findings:
            self.findings.append(found)

    def check(self, holds: object, where: _Path, given: str, expected: str, fix: str) -> None:
        """Keep a finding about a place unless a condition holds."""
        if not holds and where not in self.formless:
            self.keep(self.fail(where, given, expected, fix))

    def keys(self, data: Mapping[str, Any], where: _Path, known: tuple[str, ...]) -> None:
        """Keep a finding for every unknown key."""
        for key in data:
            self._try(super().keys, {key: data[key]}, where, known, default=None)

    def typed(
        self,
        data: Mapping[str, Any],
        key: str,
        where: _Path,
        default: _T,
        good: Callable[[Any], bool],
        form: str,
    ) -> _T:
        """Return a value of the expected form, or else the default."""
        if key in data and not good(data[key]):
            self.formless.add((*where, key))
        return self._try(super().typed, data, key, where, default, good, form, default=default)

    def text_of(self, data: Mapping[str, Any], key: str, where: _Path) -> str:
        """Return a text, or a placeholder."""
        return super().text_of(data, key, where) or _UNREADABLE

    def api(self, data: Mapping[str, Any]) -> tuple[int, int]:
        """
        Return the version of the contract; that of this core if it is invalid.

        Raises:
            ApiVersionError: It is another major version, which this core cannot read.
        """
        try:
            return super().api(data)
        except ApiVersionError:
            raise
        except ManifestError as error:
            self.keep(error)
            return CONTRACT_API

    def variants(self, data: Mapping[str, Any], *, newer: bool) -> tuple[Variant, ...]:
        """Return the variants that are tables."""
        tables = self.table(data, "variants", ())
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                self.typed(tables, name, ("variants",), {}, lambda _: False, "a table")
        kept = {name: table for name, table in tables.items() if isinstance(table, Mapping)}
        return super().variants({**data, "variants": kept}, newer=newer)

    def supports(self, data: Mapping[str, Any], where: _Path, *, newer: bool) -> Declared:
        """Return one table without the fields that are wrong. A misspelt field counts as declared."""
        table = data.get("supports", {})
        wrong: dict[str, Constraint] = {}
        while True:
            places: list[_Path] = []
            reader = _Recording(self.text, self.path, places)
            try:
                declared = Reader.supports(reader, {"supports": table}, where, newer=newer)
            except ManifestError as error:
                self.keep(error)
                name, table = _without(table, places[-1][len(where) :])
                for meant in get_close_matches(name, FIELDS, n=1):
                    wrong[meant] = Constraint(FIELDS[meant].domain, ())
            else:
                return evolve(declared, fields={**wrong, **declared.fields})

    def complete(self, declared: Declared, where: _Path) -> Declared:
        """Keep a finding for every field that is missing."""
        fields = dict(declared.fields)
        while True:
            try:
                return super().complete(evolve(declared, fields=fields), where)
            except ManifestError as error:
                self.keep(error)
                missing = next(name for name in (*MUST_DECLARE, "block_size") if name not in fields)
                fields[missing] = Constraint(FIELDS[missing].domain, ())

    def rule(self, data: Mapping[str, Any], where: _Path) -> Rule:
        """Return one rule, without its line if its conditions are invalid."""
        before = len(self.findings)
        found = super().rule(data, where)
        return found if len(self.findings) == before else evolve(found, line=None)

    def conditions(self, data: Mapping[str, Any], key: str, where: _Path) -> tuple[Condition, ...]:
        """Return the conditions that are valid."""
        found: list[Condition] = []
        for name, value in self.table(data, key, where).items():
            nothing: tuple[Condition, ...] = ()
            found += self._try(parse_conditions, self.fail, {name: value}, (*where, key), default=nothing)
        return tuple(found)

    def option(self, name: str, options: Mapping[str, Any]) -> Option:
        """Return one option; a placeholder of type text if it is invalid."""
        try:
            return super().option(name, options)
        except (KeyError, TypeError):  # its type is invalid: there is a finding about that, and the rest depends on it
            return Option(name, "str", "", _UNREADABLE)

    def _try(self, read: Callable[..., _T], *arguments: Any, default: _T) -> _T:
        try:
            return read(*arguments)
        except ManifestError as error:
            self.keep(error)
            return default


@frozen
class _Recording(Reader):
    """Records the places of errors."""

    places: list[_Path] = field(factory=list)

    def fail(self, where: _Path, given: str, expected: str, fix: str) -> ManifestError:
        self.places.append(where)
        return super().fail(where, given, expected, fix)


def _without(table: Any, inside: _Path) -> tuple[str, Any]:
    """Return the name of the wrong field, and a `supports` table without it."""
    if not inside or not isinstance(table, Mapping):
        return "", {}
    name = str(inside[0])
    if name == "features" and len(inside) > 1:
        return "", {**table, "features": [each for each in table["features"] if each != inside[1]]}
    return name, {key: value for key, value in table.items() if key != name}
