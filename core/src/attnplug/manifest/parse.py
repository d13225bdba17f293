"""
From the text of an attnplug.toml to a Manifest, or to a ManifestError with file, line and the rule that it breaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from attrs import frozen

from attnplug.errors import ApiVersionError, ManifestError
from attnplug.manifest.conditions import parse_conditions
from attnplug.manifest.installed import check_requirement
from attnplug.manifest.locate import locate
from attnplug.manifest.schema import CONTRACT_API, Jit, Manifest, Option, Preference, Rule, Variant
from attnplug.manifest.supports import Declared, complete, parse_supports
from attnplug.request.fields import near
from attnplug.request.toml import parse_toml

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_API = re.compile(r"(\d+)\.(\d+)")
_VARIANT_KEYS = ("summary", "supports", "requires", "jit", "emulates", "rules")
_OPTION_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
_T = TypeVar("_T")

DEFAULT_VARIANT = "default"
"""The name of the only variant of a manifest that lists none."""


def read_manifest(path: Path) -> Manifest:
    """
    Read and parse a file.

    Raises:
        ManifestError: The file is not there, is not UTF-8 or TOML, or breaks a rule; `ApiVersionError`
            where it speaks another major version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"the manifest cannot be read: {error}",
            "it is a UTF-8 file beside the plugin module",
            "ship it in the wheel",
            str(path),
        ) from error
    return parse_manifest(text, str(path))


def parse_manifest(text: str, path: str = "attnplug.toml") -> Manifest:
    """
    Parse the text of a manifest.

    Raises:
        ManifestError: As for `read_manifest`.
    """
    try:
        data = parse_toml(text)
    except ValueError as error:
        found = re.search(r"at line (\d+)", str(error))
        raise ManifestError(
            f"it is not TOML: {error}",
            "a manifest is a TOML 1.0 document",
            "correct the syntax",
            path,
            int(found[1]) if found else None,
        ) from error
    return _Reader(text, path).manifest(data)


@frozen
class _Reader:
    """Carries the text and the path, so that every complaint has its line."""

    text: str
    path: str

    def fail(self, where: tuple[str | int, ...], given: str, allowed: str, remedy: str) -> ManifestError:
        return ManifestError(given, allowed, remedy, self.path, locate(self.text, where))

    def manifest(self, data: Mapping[str, Any]) -> Manifest:
        api = self.api(data)
        self.keys(data, (), ("api", "backend", "supports", "rules", "variants", "prefer", "options"))
        backend = self.table(data, "backend", (), ("name", "aliases", "summary"))
        name = self.text_of(backend, "name", ("backend",))
        self.check(
            _NAME.fullmatch(name),
            ("backend", "name"),
            f"name = {name!r}",
            "a name is lower-case letters, digits and _",
            "rename it",
        )
        variants = self.variants(data, newer=api > CONTRACT_API)
        return Manifest(
            path=self.path,
            api=api,
            name=name,
            summary=self.text_of(backend, "summary", ("backend",)),
            aliases=self.texts(backend, "aliases", ("backend",)),
            variants=variants,
            prefer=self.preferences(data, tuple(v.name for v in variants)),
            options=MappingProxyType(
                {key: self.option(key, data["options"]) for key in self.table(data, "options", ())}
            ),
        )

    def api(self, data: Mapping[str, Any]) -> tuple[int, int]:
        value = data.get("api")
        form = _API.fullmatch(value) if isinstance(value, str) else None
        if form is None:
            raise self.fail(
                ("api",),
                f"api = {value!r}",
                'api is the contract version as text, such as "1.0"',
                'write api = "1.0" first',
            )
        found = (int(form[1]), int(form[2]))
        if found[0] != CONTRACT_API[0]:
            raise ApiVersionError(
                f"api = {value!r}",
                f"this core speaks contract {CONTRACT_API[0]}.x",
                "install a plugin version for this core, or another version of attnplug",
                self.path,
                locate(self.text, ("api",)),
            )
        return found

    def variants(self, data: Mapping[str, Any], *, newer: bool) -> tuple[Variant, ...]:
        tables = self.table(data, "variants", ()) or {DEFAULT_VARIANT: {}}
        supports = parse_supports(self.fail, data.get("supports", {}), ("supports",), newer=newer)
        rules = self.rules(data, ())
        return tuple(self.variant(name, tables[name], supports, rules, newer=newer) for name in tables)

    def variant(self, name: str, data: Any, shared: Declared, rules: tuple[Rule, ...], *, newer: bool) -> Variant:
        where = ("variants", name)
        self.check(
            isinstance(data, Mapping), where, f"{name} = {data!r}", "a variant is a table", f"write [variants.{name}]"
        )
        self.check(
            _NAME.fullmatch(name),
            where,
            f"the variant {name!r}",
            "a name is lower-case letters, digits and _",
            "rename it",
        )
        self.keys(data, where, _VARIANT_KEYS)
        own = parse_supports(self.fail, data.get("supports", {}), (*where, "supports"), newer=newer)
        declared = complete(self.fail, shared.under(own), where)
        emulates = {
            key: self.text_of(data["emulates"], key, (*where, "emulates"))
            for key in self.table(data, "emulates", where)
        }
        for key in emulates:
            self.check(
                key in declared.fields or key in declared.features,
                (*where, "emulates", key),
                f"emulates {key!r}",
                "what is emulated is supported too",
                f"declare {key!r} in supports",
            )
        jit = data.get("jit")
        self.check(
            jit is None or jit in get_args(Jit),
            (*where, "jit"),
            f"jit = {jit!r}",
            f"jit is one of {', '.join(get_args(Jit))}",
            "correct it, or leave it out",
        )
        return Variant(
            name=name,
            summary=self.text_of(data, "summary", where) if "summary" in data else "",
            supports=MappingProxyType(dict(declared.fields)),
            features=declared.features,
            requires=self.requirements(data, "requires", where),
            jit=jit,
            emulates=MappingProxyType(emulates),
            rules=rules + self.rules(data, where),
        )

    def rules(self, data: Mapping[str, Any], where: tuple[str | int, ...]) -> tuple[Rule, ...]:
        return tuple(self.rule(rule, (*where, "rules", i)) for i, rule in enumerate(self.tables(data, "rules", where)))

    def rule(self, data: Mapping[str, Any], where: tuple[str | int, ...]) -> Rule:
        self.keys(data, where, ("when", "need", "because"))
        when = parse_conditions(self.fail, self.table(data, "when", where), (*where, "when"))
        self.check(
            when, where, "a rule without `when`", "a rule says when it applies", "what is always so belongs in supports"
        )
        need = parse_conditions(self.fail, self.table(data, "need", where), (*where, "need"))
        return Rule(when, need, self.text_of(data, "because", where), locate(self.text, where))

    def preferences(self, data: Mapping[str, Any], variants: tuple[str, ...]) -> tuple[Preference, ...]:
        return tuple(
            self.preference(item, ("prefer", i), variants) for i, item in enumerate(self.tables(data, "prefer", ()))
        )

    def preference(
        self, data: Mapping[str, Any], where: tuple[str | int, ...], variants: tuple[str, ...]
    ) -> Preference:
        self.keys(data, where, ("order", "when", "because"))
        order = self.texts(data, "order", where)
        good = order and len(set(order)) == len(order) and set(order) <= set(variants)
        self.check(
            good,
            (*where, "order"),
            f"order = {list(order)}",
            f"an order lists variants of this manifest, each once: {', '.join(variants)}",
            "correct the list",
        )
        when = parse_conditions(self.fail, self.table(data, "when", where), (*where, "when"))
        return Preference(order, when, self.text_of(data, "because", where))

    def option(self, name: str, options: Mapping[str, Any]) -> Option:
        where = ("options", name)
        data = self.table(options, name, ("options",), ("type", "min", "max", "choices", "default", "help"))
        self.check(
            _NAME.fullmatch(name),
            where,
            f"the option {name!r}",
            "a name is lower-case letters, digits and _",
            "rename it",
        )
        kind = data.get("type")
        self.check(
            kind in _OPTION_TYPES,
            (*where, "type"),
            f"type = {kind!r}",
            f"a type is one of {', '.join(_OPTION_TYPES)}",
            "correct it",
        )
        self.check(
            "default" in data, where, f"the option {name!r} without a default", "every option has a default", "add one"
        )
        option = Option(
            name,
            data["type"],
            data["default"],
            self.text_of(data, "help", where),
            data.get("min"),
            data.get("max"),
            tuple(data.get("choices", ())),
        )
        self.check(
            option.admits(option.default),
            (*where, "default"),
            f"default = {option.default!r}",
            f"the default is {option.allowed()}",
            "correct it",
        )
        return option

    def requirements(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> tuple[str, ...]:
        texts = self.texts(data, key, where)
        for text in texts:
            problem = check_requirement(text)
            self.check(
                not problem,
                (*where, key),
                f"{key} contains {text!r}",
                f"it is a PEP 508 requirement: {problem}",
                "write it as in pyproject.toml",
            )
        return texts

    # The small checks below keep every complaint in one form.

    def check(self, holds: object, where: tuple[str | int, ...], given: str, allowed: str, remedy: str) -> None:
        if not holds:
            raise self.fail(where, given, allowed, remedy)

    def keys(self, data: Mapping[str, Any], where: tuple[str | int, ...], known: tuple[str, ...]) -> None:
        for key in data:
            if key not in known:  # looking for a near name takes longer than reading the whole manifest
                place = ".".join(map(str, where)) or "the manifest"
                raise self.fail(
                    (*where, key),
                    f"the key {key!r} in {place}{near(key, known)}",
                    f"the keys are {', '.join(known)}",
                    "correct or remove it",
                )

    def table(
        self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...], known: tuple[str, ...] = ()
    ) -> Mapping[str, Any]:
        empty: Mapping[str, Any] = {}
        found = self.typed(data, key, where, empty, lambda v: isinstance(v, Mapping), "a table")
        if known:
            self.keys(found, (*where, key), known)
        return found

    def tables(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> list[Mapping[str, Any]]:
        return self.typed(
            data,
            key,
            where,
            [],
            lambda v: isinstance(v, list) and all(isinstance(i, Mapping) for i in v),
            f"a list of tables [[{key}]]",
        )

    def texts(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> tuple[str, ...]:
        return tuple(
            self.typed(
                data,
                key,
                where,
                [],
                lambda v: isinstance(v, list) and all(isinstance(i, str) and i for i in v),
                "a list of texts",
            )
        )

    def text_of(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> str:
        self.check(key in data, where, f"no {key!r}", f"{key!r} is a text and has to be there", f'add {key} = "..."')
        return self.typed(data, key, where, "", lambda v: isinstance(v, str) and v.strip() != "", "a text")

    def typed(
        self,
        data: Mapping[str, Any],
        key: str,
        where: tuple[str | int, ...],
        default: _T,
        good: Callable[[Any], bool],
        form: str,
    ) -> _T:
        value: _T = data.get(key, default)
        if key in data and not good(value):  # as above: writing out a table costs more than reading it
            raise self.fail((*where, key), f"{key} = {value!r}", f"{key!r} is {form}", "correct it")
        return value
