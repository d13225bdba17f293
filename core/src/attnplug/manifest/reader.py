"""Reading a manifest: every table is checked for unknown keys and for the form of its values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from attrs import evolve, frozen

from attnplug._foreign import shortened
from attnplug.errors import ApiVersionError, ManifestError, near
from attnplug.manifest.installed import check_requirement, requirement_name
from attnplug.manifest.line_numbers import locate
from attnplug.manifest.schema import (
    CONTRACT_API,
    Condition,
    Jit,
    Manifest,
    Option,
    OptionType,
    Preference,
    Rule,
    Variant,
)
from attnplug.manifest.supports import Declared, complete, parse_conditions, parse_supports
from attnplug.request.files import read_text
from attnplug.request.settings import parse_toml
from attnplug.request.tables import read_only

if TYPE_CHECKING:
    from pathlib import Path


_T = TypeVar("_T")


@frozen
class Checks:
    """
    The small checks of a reader. They know the text and the path, so that every error has its line.

    Attributes:
        text: The document.
        path: The file that it is from.
    """

    text: str
    path: str

    def fail(self, where: tuple[str | int, ...], problem: str, expected: str, fix: str) -> ManifestError:
        """Return the error about a place."""
        return ManifestError(shortened(problem, 1000), expected, fix, self.path, locate(self.text, where))

    def check(self, holds: object, where: tuple[str | int, ...], problem: str, expected: str, fix: str) -> None:
        """Raise the error about a place unless something holds."""
        if not holds:
            raise self.fail(where, problem, expected, fix)

    def keys(self, data: Mapping[str, Any], where: tuple[str | int, ...], known: tuple[str, ...]) -> None:
        """Refuse keys that a table does not have."""
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
        """Return a table inside another; an empty one where it is left out."""
        empty: Mapping[str, Any] = {}
        found = self.typed(data, key, where, empty, lambda v: isinstance(v, Mapping), "a table")
        if known:
            self.keys(found, (*where, key), known)
        return found

    def tables(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> list[Mapping[str, Any]]:
        """Return an array of tables; an empty one where it is left out."""
        return self.typed(data, key, where, [], _are_tables, f"a list of tables [[{key}]]")

    def texts(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> tuple[str, ...]:
        """Return a list of texts; an empty one where it is left out."""
        return tuple(self.typed(data, key, where, [], _are_texts, "a list of texts"))

    def text_of(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> str:
        """Return a text that has to be there."""
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
        """Return a value of the expected form, or the default where it is left out."""
        value: _T = data.get(key, default)
        if key in data and not good(value):  # as above: writing out a table costs more than reading it
            raise self.fail((*where, key), f"{key} = {value!r}", f"{key!r} is {form}", "correct it")
        return value

    def name(self, name: str, where: tuple[str | int, ...], problem: str) -> None:
        """Refuse a name of another form."""
        self.check(_NAME.fullmatch(name), where, problem, "a name is lower-case letters, digits and _", "rename it")


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


LARGEST: Final = 2**16
"""Bytes of a manifest at most: seven times the longest known one. Parsing a file takes a second for every MiB."""

_MOST_VARIANTS: Final = 100  # every request is compared with each
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_API = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_VARIANT_KEYS = ("summary", "supports", "requires", "install", "jit", "emulates", "rules")

DEFAULT_VARIANT: Final = "default"
"""The name of the only variant of a manifest that lists none."""


@frozen
class Reader(Checks):
    """Reads the parts of one document. The first error ends it."""

    def manifest(self, data: Mapping[str, Any]) -> Manifest:
        """Return the whole manifest."""
        api = self.api(data)
        self.keys(data, (), ("api", "backend", "supports", "rules", "variants", "prefer", "options"))
        backend = self.table(data, "backend", (), ("name", "aliases", "summary"))
        name = self.text_of(backend, "name", ("backend",))
        self.name(name, ("backend", "name"), f"name = {name!r}")
        variants = self.variants(data, newer=api > CONTRACT_API)
        return Manifest(
            path=self.path,
            api=api,
            name=name,
            summary=self.text_of(backend, "summary", ("backend",)),
            aliases=self.aliases(backend),
            variants=variants,
            prefer=self.preferences(data, tuple(v.name for v in variants)),
            options=read_only({key: self.option(key, data["options"]) for key in self.table(data, "options", ())}),
        )

    def aliases(self, backend: Mapping[str, Any]) -> tuple[str, ...]:
        """Return other names. Letters that look like others select what nobody meant."""
        found = self.texts(backend, "aliases", ("backend",))
        for alias in found:
            self.check(
                _ALIAS.fullmatch(alias) is not None,
                ("backend", "aliases"),
                f"the alias {alias!a}",
                "an alias has letters from A to Z, digits, and _ . - within",
                "write it so, or leave it out",
            )
        return found

    def api(self, data: Mapping[str, Any]) -> tuple[int, int]:
        """Return the version of the contract that it was written for."""
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
                f"this core has contract {CONTRACT_API[0]}.x",
                "install a plugin version for this core, or another version of attnplug",
                self.path,
                locate(self.text, ("api",)),
            )
        return found

    def variants(self, data: Mapping[str, Any], *, newer: bool) -> tuple[Variant, ...]:
        """Return every variant, with what is shared."""
        tables = self.table(data, "variants", ()) or {DEFAULT_VARIANT: {}}
        self.check(
            len(tables) <= _MOST_VARIANTS,
            ("variants",),
            f"{len(tables):,} variants",
            f"a manifest has at most {_MOST_VARIANTS} variants",
            "publish several backends, or leave some out",
        )
        supports = self.supports(data, ("supports",), newer=newer)
        rules = self.rules(data, ())
        return tuple(self.variant(name, tables[name], supports, rules, newer=newer) for name in tables)

    def variant(self, name: str, data: Any, shared: Declared, rules: tuple[Rule, ...], *, newer: bool) -> Variant:
        """Return one variant."""
        where = ("variants", name)
        self.check(
            isinstance(data, Mapping), where, f"{name} = {data!r}", "a variant is a table", f"write [variants.{name}]"
        )
        self.name(name, where, f"the variant {name!r}")
        self.keys(data, where, _VARIANT_KEYS)
        own = self.supports(data, (*where, "supports"), newer=newer)
        declared = self.complete(shared.under(own), where)
        emulates = {
            key: self.text_of(data["emulates"], key, (*where, "emulates"))
            for key in self.table(data, "emulates", where)
        }
        known = (*declared.fields, *declared.features)
        for key in emulates:
            self.check(
                key in known,
                (*where, "emulates", key),
                f"emulates {key!r}{'' if key in known else near(key, known)}",
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
        requires = self.requires(data, where)
        return Variant(
            name=name,
            summary=self.text_of(data, "summary", where) if "summary" in data else "",
            supports=read_only(declared.fields),
            features=declared.features,
            requires=requires,
            install=self.instructions(data, requires, where),
            jit=jit,
            emulates=read_only(emulates),
            rules=rules + self.rules(data, where),
        )

    def supports(self, data: Mapping[str, Any], where: tuple[str | int, ...], *, newer: bool) -> Declared:
        """Return one table of declared fields."""
        return parse_supports(self.fail, data.get("supports", {}), where, newer=newer)

    def complete(self, declared: Declared, where: tuple[str | int, ...]) -> Declared:
        """Return what a variant declares, once it is all there."""
        return complete(self.fail, declared, where)

    def rules(self, data: Mapping[str, Any], where: tuple[str | int, ...]) -> tuple[Rule, ...]:
        """Return the rules of a table."""
        return tuple(self.rule(rule, (*where, "rules", i)) for i, rule in enumerate(self.tables(data, "rules", where)))

    def rule(self, data: Mapping[str, Any], where: tuple[str | int, ...]) -> Rule:
        """Return one rule."""
        self.keys(data, where, ("when", "need", "because"))
        when = self.conditions(data, "when", where)
        self.check(
            when, where, "a rule without `when`", "a rule says when it applies", "what is always so belongs in supports"
        )
        need = self.conditions(data, "need", where)
        return Rule(when, need, self.text_of(data, "because", where), locate(self.text, where))

    def conditions(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> tuple[Condition, ...]:
        """Return the conditions under a key."""
        return parse_conditions(self.fail, self.table(data, key, where), (*where, key))

    def preferences(self, data: Mapping[str, Any], variants: tuple[str, ...]) -> tuple[Preference, ...]:
        """Return the orders of the manifest's own variants."""
        return tuple(
            self.preference(item, ("prefer", i), variants) for i, item in enumerate(self.tables(data, "prefer", ()))
        )

    def preference(
        self, data: Mapping[str, Any], where: tuple[str | int, ...], variants: tuple[str, ...]
    ) -> Preference:
        """Return one of them."""
        self.keys(data, where, ("order", "when", "because"))
        order = self.texts(data, "order", where)
        unknown = [name for name in order if name not in variants]
        self.check(
            order and len(set(order)) == len(order) and not unknown,
            (*where, "order"),
            f"order = {list(order)}{near(unknown[0], variants) if unknown else ''}",
            f"an order lists variants of this manifest, each once: {', '.join(variants)}",
            "correct the list",
        )
        when = self.conditions(data, "when", where)
        return Preference(order, when, self.text_of(data, "because", where))

    def option(self, name: str, options: Mapping[str, Any]) -> Option:
        """Return one option."""
        where = ("options", name)
        data = self.table(options, name, ("options",), ("type", "min", "max", "choices", "default", "help"))
        self.name(name, where, f"the option {name!r}")
        kind = data.get("type")
        self.check(
            kind in get_args(OptionType),
            (*where, "type"),
            f"type = {kind!r}",
            f"a type is one of {', '.join(get_args(OptionType))}",
            "correct it",
        )
        self.bounds(data, where)
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
            tuple(self.typed(data, "choices", where, [], lambda v: isinstance(v, list), "a list of values")),
        )
        for choice in option.choices:
            self.check(
                option.admits(choice),
                (*where, "choices"),
                f"choices contains {choice!r}",
                f"each choice is {evolve(option, choices=()).allowed()}",
                "correct the list",
            )
        self.check(
            option.admits(option.default),
            (*where, "default"),
            f"default = {option.default!r}",
            f"the default is {option.allowed()}",
            "correct it",
        )
        return option

    def bounds(self, data: Mapping[str, Any], where: tuple[str | int, ...]) -> None:
        """Refuse bounds that compare with nothing."""
        kind = data["type"]
        for key in ("min", "max"):
            numbers = kind in ("int", "float") and type(data.get(key, 0)) in (int, float)
            self.check(
                key not in data or numbers,
                (*where, key),
                f"{key} = {data.get(key)!r}",
                f"{key!r} is a number, for an option whose type is int or float",
                "correct it, or leave it out",
            )

    def instructions(
        self, data: Mapping[str, Any], requires: tuple[str, ...], where: tuple[str | int, ...]
    ) -> Mapping[str, str]:
        """Return how to install what a variant requires, by name."""
        names = tuple(requirement_name(text) for text in requires if not check_requirement(text))
        found = self.table(data, "install", where)
        for name in found:
            self.check(
                name in names
                or len(names) < len(requires),  # an entry of requires that cannot be read may be the one that is meant
                (*where, "install", name),
                f"install names {name!r}{'' if name in names else near(name, names)}",
                f"it says how to install what requires names: {', '.join(names) or 'nothing'}",
                "write the name as in requires, or leave it out",
            )
        return read_only({name: self.text_of(found, name, (*where, "install")) for name in found})

    def requires(self, data: Mapping[str, Any], where: tuple[str | int, ...]) -> tuple[str, ...]:
        """Return the PEP 508 requirements of a variant."""
        texts = self.texts(data, "requires", where)
        for text in texts:
            problem = check_requirement(text)
            self.check(
                not problem,
                (*where, "requires"),
                f"requires contains {text!r}",
                f"it is a PEP 508 requirement: {problem}",
                "write it as in pyproject.toml",
            )
        return texts


def read_manifest(path: Path) -> Manifest:
    """
    Read and parse a file.

    Raises:
        ManifestError: The file is not there, is no regular file of at most 64 KiB, is not UTF-8 or TOML, or breaks a
            rule; `ApiVersionError` where it is written for another major version.
    """
    try:
        text = read_text(path, LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    return parse_manifest(text, str(path))


def unreadable(path: Path, error: Exception) -> ManifestError:
    """Return the error for a file that cannot be read."""
    return ManifestError(
        f"the manifest cannot be read: {error}",
        f"it is a UTF-8 file beside the plugin module, of at most {LARGEST // 2**10} KiB",
        "ship it in the wheel",
        str(path),
    )


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
            f"it is not TOML: {shortened(str(error), 1000)}",
            "a manifest is a TOML 1.0 document",
            "correct the syntax",
            path,
            int(found[1]) if found else None,
        ) from error
    try:
        return Reader(text, path).manifest(data)
    except RecursionError as error:  # a message would repeat such a value
        raise ManifestError(
            "values are nested too deeply", "no value of a manifest has many levels", "correct it", path
        ) from error
