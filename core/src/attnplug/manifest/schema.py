"""The parts of a manifest, parsed, as frozen data."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import field, frozen

from attnplug.errors import SettingsError, near, shown
from attnplug.manifest.memo import remember
from attnplug.request.settings import parse_flag
from attnplug.request.tables import is_plain, read_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.manifest.constraint import Constraint
    from attnplug.request.settings import Settings

CONTRACT_API: Final = (1, 0)
"""
The version of the contract that this core has: (major, minor). A manifest for another major version is refused before
import; one for a newer minor version is accepted and noted.
"""

GROUP: Final = "attnplug.backends"
"""The entry-point group of plugins: the name is the backend's, the value is the plugin module."""

MANIFEST: Final = "attnplug.toml"
"""The name of the file that describes a backend, beside its plugin module."""

Jit = Literal["nvcc", "triton", "cute", "inductor"]
OptionType = Literal["int", "float", "bool", "str"]


def is_module(value: str) -> bool:
    """Whether a text is the dotted name of a module."""
    return all(part.isidentifier() for part in value.split("."))


@frozen
class Holds:
    """A condition: the field's value is allowed by the constraint."""

    field: str
    constraint: Constraint
    _known: dict[Any, bool] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def holds(
        self, facts: Mapping[str, Any], requested: frozenset[str], installed: frozenset[IsInstalled], *, absent: bool
    ) -> bool:
        """
        Decide the condition. The answers are remembered: requests repeat the same few values.

        Args:
            facts: Every field's value, canonical.
            requested: Names of the fields that request something.
            installed: The ``installed`` conditions that are true.
            absent: The answer for a field that has no value (no window, no block size): false in ``when``,
                true in ``need``.
        """
        del requested, installed
        value = facts[self.field]
        if value is None:
            return absent
        known = self._known.get(value)
        return remember(self._known, value, self.constraint.allows(value)) if known is None else known

    def __str__(self) -> str:
        allowed = str(self.constraint)
        relation = " " if allowed[:2] in ("<=", ">=") else " in " if allowed.startswith("multiples") else " = "
        return f"{self.field}{relation}{allowed}"


@frozen
class IsRequested:
    """A condition: the field requests something (or, with `requested` false, nothing)."""

    field: str
    requested: bool

    def holds(
        self, facts: Mapping[str, Any], requested: frozenset[str], installed: frozenset[IsInstalled], *, absent: bool
    ) -> bool:
        """Decide the condition; arguments as for `Holds`."""
        del facts, installed, absent
        return (self.field in requested) == self.requested

    def __str__(self) -> str:
        return f"{self.field} {'requested' if self.requested else 'not requested'}"


@frozen
class IsInstalled:
    """A condition: a distribution that matches one of these PEP 508 requirements is installed."""

    requirements: tuple[str, ...]
    field: str = "installed"

    def holds(
        self, facts: Mapping[str, Any], requested: frozenset[str], installed: frozenset[IsInstalled], *, absent: bool
    ) -> bool:
        """Decide the condition; arguments as for `Holds`."""
        del facts, requested, absent
        return self in installed

    def __str__(self) -> str:
        return f"installed: {' or '.join(self.requirements)}"


Condition = Holds | IsRequested | IsInstalled


@frozen
class Rule:
    """
    Where all of `when` hold, all of `need` must hold; without `need` the combination is refused.

    Attributes:
        because: The reason, as a user reads it.
        line: Its line in the manifest.
    """

    when: tuple[Condition, ...]
    need: tuple[Condition, ...]
    because: str
    line: int | None = field(default=None, eq=False)


@frozen
class Preference:
    """An order of the plugin's own variants, for requests where all of `when` hold."""

    order: tuple[str, ...]
    when: tuple[Condition, ...]
    because: str


@frozen
class Option:
    """A setting of a plugin. It tunes; it never changes what the backend supports."""

    name: str
    type: OptionType
    default: Any
    help: str
    min: float | None = None
    max: float | None = None
    choices: tuple[Any, ...] = ()

    def read(self, value: Any, source: str) -> Any:
        """
        Return the value that a user wrote, from a text if it came from the environment.

        Raises:
            SettingsError: It has another type, or is outside the bounds.
        """
        found = self._parse(value, source) if isinstance(value, str) and self.type != "str" else value
        if not self.admits(found):
            self._refuse(value, source)
        return float(found) if self.type == "float" else found

    def admits(self, value: Any) -> bool:
        """Whether `value` has the option's type and is within its bounds."""
        kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
        if (
            type(value) not in kinds[self.type]
            or not (type(value) is float or is_plain(value))
            or (self.choices and value not in self.choices)
        ):
            return False
        return not ((self.min is not None and value < self.min) or (self.max is not None and value > self.max))

    def allowed(self) -> str:
        """Describe the values, for messages and documentation."""
        bounds = [f"from {self.min}"] * (self.min is not None) + [f"up to {self.max}"] * (self.max is not None)
        return " ".join(
            [self.type, *bounds, *([f"one of {', '.join(map(repr, self.choices))}"] if self.choices else [])]
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.allowed()}, default {self.default!r}): {self.help}"

    def _parse(self, text: str, source: str) -> Any:
        if self.type == "bool":
            return parse_flag(text, source)
        try:
            return (int if self.type == "int" else float)(text.encode("ascii"))
        except ValueError:  # Python reads the digits of all scripts; a setting is copied into other programs
            return self._refuse(text, source)

    def _refuse(self, value: Any, source: str) -> Any:
        raise SettingsError(
            f"{self.name}={shown(value)} was given by {source}",
            f"{self.name} ({self.help}) is {self.allowed()}",
            f"its default is {self.default!r}",
        )


@frozen
class Variant:
    """
    One build of one kernel library: a candidate of the selection.

    Attributes:
        supports: The declared fields. A field that is not here accepts its neutral value only.
        features: Open features, by dotted name.
        requires: PEP 508 requirements, checked against installed distributions and never by import.
        install: How to install some of these, by name, where ``pip install`` of the requirement does not.
        jit: What the first use compiles with, or None.
        emulates: Features that work, at a cost that the text states; it ranks below variants that emulate fewer.
        rules: The manifest's rules, then the variant's own.
    """

    name: str
    summary: str
    supports: Mapping[str, Constraint] = field(hash=False)
    features: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    install: Mapping[str, str] = field(factory=dict, hash=False)
    jit: Jit | None = None
    emulates: Mapping[str, str] = field(factory=dict, hash=False)
    rules: tuple[Rule, ...] = ()


@frozen
class Manifest:
    """
    One backend, described as data.

    Attributes:
        path: Where it was read, for messages.
        api: The contract that it was written for, (major, minor).
        name: The backend's name.
        summary: One line about it.
        aliases: Its other names.
        variants: Its candidates.
        prefer: Orders of its variants.
        options: Its settings.
        default_options: Each of them with its default.
    """

    path: str
    api: tuple[int, int]
    name: str
    summary: str
    aliases: tuple[str, ...]
    variants: tuple[Variant, ...]
    prefer: tuple[Preference, ...] = ()
    options: Mapping[str, Option] = field(factory=dict, hash=False)
    default_options: Mapping[str, Any] = field(init=False, repr=False, eq=False)

    @default_options.default
    def _defaults(self) -> Mapping[str, Any]:
        return read_only({name: option.default for name, option in self.options.items()})

    @property
    def is_newer(self) -> bool:
        """Whether it was written for a newer minor version of the contract."""
        return self.api > CONTRACT_API

    def options_under(self, settings: Settings) -> Mapping[str, Any]:
        """
        Return every option with its value: set under the backend's name, under an alias, or the default. Whichever name
        was used, a call comes before `using`, that before the environment, that before the configuration file.

        Raises:
            SettingsError: An option is unknown or its value is not allowed.
        """
        if not settings.options:
            return self.default_options  # nearly always, and for every candidate that can serve
        places = {key: place for place, key in enumerate(settings.sources)}
        found = [
            (places.get(f"options.{name}.{option}", -1), option, value, f"options.{name}.{option}")
            for name in (*self.aliases, self.name)
            for option, value in settings.options.get(name, {}).items()
        ]
        found.sort(key=itemgetter(0))  # by precedence; of equals, the value under the backend's own name counts
        given = {option: value for _, option, value, _ in found}
        return self.read_options(
            given, {option: settings.sources.get(key, "the settings") for _, option, _, key in found}
        )

    def read_options(self, given: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
        """
        Return every option with its value: the given one, or the default.

        Args:
            given: Values by option name.
            sources: Where each value came from.

        Raises:
            SettingsError: An option is unknown or its value is not allowed.
        """
        for name in given:
            if name not in self.options:
                source = sources.get(name, "the call")
                raise SettingsError(
                    f"the option {name!r} of {self.name!r} was given by {source}{near(name, self.options)}",
                    f"{self.name!r} has {', '.join(self.options) or 'no options'}",
                    f"correct the name, or remove it; `attnplug options {self.name}` says what each option does",
                )
        return {
            name: option.read(given[name], sources.get(name, "the call")) if name in given else option.default
            for name, option in self.options.items()
        }
