"""What settings name for backends: their options, checked by their manifests, and the profile of measured times."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import ManifestError, SettingsError
from attnplug.manifest.schema import Condition
from attnplug.manifest.supports import parse_conditions
from attnplug.request.files import read_text
from attnplug.request.settings import parse_toml

if TYPE_CHECKING:
    from attnplug.discovery.registry import Registry
    from attnplug.negotiation.matching import Request
    from attnplug.request.settings import Settings


def check_options(registry: Registry, settings: Settings) -> None:
    """
    Check everything that is set for installed backends, whether or not they can serve.

    Options of a known backend that is not installed wait for it: only its manifest can say whether they are right.

    Raises:
        SettingsError: An option is unknown or its value is not allowed, or options are given for one variant.
        UnknownBackendError: A name is neither installed nor known.
    """
    for name in settings.options:  # an option of an unknown backend would silently have no effect
        check_owner(registry, name)
    for plugin in registry.plugins if settings.options else ():
        if plugin.manifest is not None:
            plugin.manifest.options_under(settings)


def check_owner(registry: Registry, name: str) -> None:
    """
    Check that options can belong to what a name selects.

    Raises:
        SettingsError: It is one variant.
        UnknownBackendError: It is neither installed nor known.
    """
    if "/" in name:
        raise SettingsError(
            f"options for {name!r} were given",
            "options belong to a backend, and hold for all of its variants",
            f"give them to {name.partition('/')[0]!r}",
        )
    registry.check_name(name)


_LARGEST: Final = 2**20  # bytes of a profile at most

Table = tuple[tuple[Condition, ...], Mapping[str, float]]


@frozen(eq=False, slots=False)
class Profile:
    """
    Measured times, from a file that is read when they are first needed, once.

    Attributes:
        path: The file; None without a profile.
    """

    path: str | None

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """
        The content of the file.

        Raises:
            SettingsError: The file cannot be read or is not a profile.
        """
        return read_profile(self.path) if self.path else ()

    def measured(self, request: Request) -> Mapping[str, float]:
        """
        Return microseconds by candidate id, from the first table whose conditions hold.

        Raises:
            SettingsError: As for `tables`.
        """
        for when, times in self.tables if self.path else ():
            if all(
                condition.holds(request.facts, request.requested_names, frozenset(), absent=False) for condition in when
            ):
                return times
        return {}


def profile_error(settings: Settings) -> SettingsError | None:
    """Return what is wrong with the profile that is set, which every selection raises, or None."""
    try:
        Profile(settings.profile).tables  # noqa: B018 - reading it is the check
    except SettingsError as error:
        return error
    return None


def read_profile(path: str) -> tuple[Table, ...]:
    """
    Read a profile.

    Raises:
        SettingsError: The file cannot be read or is not a profile.
    """
    try:
        data = parse_toml(read_text(path, _LARGEST))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the profile {path!r} is set", f"it cannot be read: {error}", "correct the file, or unset ATTNPLUG_PROFILE"
        ) from error
    tables = data.get("measured")
    if set(data) != {"measured"} or not isinstance(tables, list):
        raise _malformed(path, f"it holds {', '.join(map(repr, data)) or 'nothing'}")
    return tuple(_table(path, table) for table in tables)


def _table(path: str, table: Any) -> Table:
    if not isinstance(table, Mapping) or set(table) - {"when"} != {"microseconds"}:
        raise _malformed(path, f"a table is {table!r}")
    times = table["microseconds"]
    if not isinstance(times, Mapping) or not all(
        type(time) in (int, float) and 0 < time < inf for time in times.values()
    ):
        raise _malformed(path, f"microseconds = {times!r}")
    try:
        return parse_conditions(
            lambda _, problem, expected, fix: ManifestError(problem, expected, fix, path), table.get("when", {}), ()
        ), times
    except ManifestError as error:
        raise SettingsError(f"the profile {path!r} is set: {error.problem}", error.expected, error.fix) from error


def _malformed(path: str, found: str) -> SettingsError:
    return SettingsError(
        f"the profile {path!r} is set: {found}",
        "a profile is a list of [[measured]] tables with `when` and `microseconds` (positive, by candidate id)",
        "correct the file, or unset ATTNPLUG_PROFILE",
    )
