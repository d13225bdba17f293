"""What settings name for backends: their options, checked by their manifests, and the profile of measured times."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.errors import ManifestError, SettingsError
from attnplug.manifest.schema import Condition
from attnplug.manifest.supports import parse_conditions
from attnplug.request.files import read_text
from attnplug.request.settings import parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnplug.discovery.registry import Registry
    from attnplug.evidence.profile import ProfileEntry
    from attnplug.evidence.times import Measured, TimeTable
    from attnplug.manifest.installed import VersionOf
    from attnplug.negotiation.matching import Request
    from attnplug.request.device import Device
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


_LARGEST: Final = 2**20  # bytes of a profile of TOML at most
_LARGEST_ENTRIES: Final = 2**25  # bytes of a file of entries at most; an entry has a thousand
_MOST_FILES: Final = 10_000  # files of a folder at most
SHIPPED: Final = Path(__file__).parents[1] / "evidence" / "profiles"
"""The folder of the profiles that core ships: a file per device, named as `file_of` says, or by a shorter name."""

_PIN: Final = "#sha256="
_OFF: Final = "off"  # in place of a path: no profile counts, the shipped ones included

Table = tuple[tuple[Condition, ...], Mapping[str, float]]


@frozen(eq=False)
class ProfileContent:
    """
    The content of a profile.

    Attributes:
        tables: The tables of a hand-written file.
        entries: The entries that `attnplug tune` wrote.
        notes: What is wrong with single files of a folder, which are left out; a sentence each.
    """

    tables: tuple[Table, ...] = ()
    entries: tuple[ProfileEntry, ...] = ()
    notes: tuple[str, ...] = ()


@frozen(eq=False)
class RequestTimes:
    """
    The measured times for one request.

    Attributes:
        local: A number per candidate, the least for the fastest, from the profile that the settings name.
        shipped: The same from the profile that core ships for this device.
        measured: The entries behind them, local ones first.
    """

    local: Mapping[str, float] = field(factory=dict)
    shipped: Mapping[str, float] = field(factory=dict)
    measured: tuple[Measured, ...] = ()

    def line(self, decided_by: str, chosen: str, rival: str) -> str:
        """Return the measurement behind a decision, in a line; empty where no entry decided."""
        level = {"measured profile": "local", "shipped profile": "shipped"}.get(decided_by)
        return next((each.line(chosen, rival) for each in self.measured if each.level == level), "")


_NOTHING: Final = RequestTimes()


@frozen(eq=False, slots=False)
class Profile:
    """
    Measured times: those of the settings, and those that core ships. Files are read when first needed, once.

    Attributes:
        path: The file or folder of the settings, with ``#sha256=HASH`` behind it where its content is pinned; None
            without one; ``off`` where no measured time counts, shipped ones included.
        shipped_in: The folder of the shipped files, a file per device.
    """

    path: str | None
    shipped_in: Path = SHIPPED
    _tables: dict[str, TimeTable] = field(factory=dict, init=False)

    @cached_property
    def content(self) -> ProfileContent:
        """
        The content of the file.

        Raises:
            SettingsError: The file cannot be read, is not a profile, or not the pinned one.
        """
        return read_profile(self.path) if self.path and self.path != _OFF else ProfileContent()

    def times(self, request: Request, version_of: VersionOf) -> RequestTimes:
        """
        Return the measured times for a request.

        Args:
            request: The request.
            version_of: The installed version of a distribution, or None.

        Raises:
            SettingsError: As for `content`.
        """
        if self.path == _OFF or (self.path is None and request.device.name is None):
            return _NOTHING
        tables = self._of_levels(request.device, version_of)
        found = [table.measured(request.requirements, request.device) for table in tables]
        measured = tuple(each for each in found if each is not None)
        scores = {each.level: each.scores for each in measured}
        return RequestTimes(scores.get("local") or self._by_hand(request), scores.get("shipped", {}), measured)

    def notes(self, device: Device, version_of: VersionOf) -> tuple[str, ...]:
        """
        Return what of the profile does not count on a device, and why; a sentence each. Of the shipped one only what is
        for this device.

        Raises:
            SettingsError: As for `content`.
        """
        if self.path == _OFF or (self.path is None and device.name is None):
            return ()
        return tuple(note for table in self._of_levels(device, version_of) for note in table.notes(device))

    def _of_levels(self, device: Device, version_of: VersionOf) -> list[TimeTable]:
        from attnplug.evidence.times import TimeTable  # noqa: PLC0415 - deciding without a profile does without

        names = {"": "local"} if self.content.entries or self.content.notes else {}
        names |= {file_of(device.name): "shipped"} if device.name is not None else {}
        for name, level in names.items():
            if name not in self._tables:
                content = self.content if level == "local" else _read_shipped(self.shipped_in, name)
                self._tables.setdefault(name, TimeTable(content.entries, level, version_of, content.notes))
        return [self._tables[name] for name in names]

    def _by_hand(self, request: Request) -> Mapping[str, float]:
        """Return microseconds by candidate id, from the first table whose conditions hold."""
        for when, times in self.content.tables:
            if all(
                condition.holds(request.facts, request.requested_names, frozenset(), absent=False) for condition in when
            ):
                return times
        return {}


def file_of(device_name: str) -> str:
    """Return the name of the shipped file for a device, without its suffix: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def _read_shipped(folder: Path, name: str) -> ProfileContent:
    """Read the shipped files of a device: of those with its name, or a shorter or longer one, as products have."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".json" and is_product(path.stem, name))
    except OSError:
        return ProfileContent()
    return _read_files(files) if files else ProfileContent()


def is_product(one: str, other: str) -> bool:
    """Whether one name has all words of the other at its beginning: ``nvidia-h100`` and ``nvidia-h100-80gb-hbm3``."""
    return f"{one}-".startswith(f"{other}-") or f"{other}-".startswith(f"{one}-")


def profile_error(settings: Settings) -> SettingsError | None:
    """Return what is wrong with the profile that is set, which every selection raises, or None."""
    try:
        Profile(settings.profile).content  # noqa: B018 - reading it is the check
    except SettingsError as error:
        return error
    return None


def profile_notes(settings: Settings, device: Device, version_of: VersionOf) -> tuple[str, ...]:
    """Return what of the profiles does not count on a device, and why; nothing for one that cannot be read."""
    try:
        return Profile(settings.profile).notes(device, version_of)
    except SettingsError:
        return ()


def read_profile(path: str) -> ProfileContent:
    """
    Read a profile: a file of entries, a folder of such files, or a hand-written file of TOML.

    Args:
        path: The path; with ``#sha256=HASH`` behind it, its entries have that hash.

    Raises:
        SettingsError: The file cannot be read, is not a profile, or its entries have another hash.
    """
    place, pinned, expected = path.partition(_PIN)
    try:
        if os.path.isdir(place):  # noqa: PTH112 - pathlib costs more
            found = _read_files(sorted(path for path in Path(place).iterdir() if path.suffix == ".json")[:_MOST_FILES])
        else:
            text = read_text(place, _LARGEST_ENTRIES)
            found = _read_entries(text) if text.lstrip().startswith("{") else ProfileContent(_read_tables(path, text))
    except SettingsError:  # a ValueError too
        raise
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"the profile {path!r} is set", f"it cannot be read: {error}", "correct the file, or unset ATTNPLUG_PROFILE"
        ) from error
    if not (found.tables or found.entries or found.notes):
        raise _malformed(path, "it holds no entry")
    if pinned:
        _check_hash(path, found, expected)
    return found


def _check_hash(path: str, found: ProfileContent, expected: str) -> None:
    from attnplug.evidence.profile import content_hash  # noqa: PLC0415 - as above

    here = content_hash(found.entries)
    if here != expected:
        raise SettingsError(
            f"the profile {path!r} is set, and its entries have the hash {here}",
            "all ranks of a model decide on the times of the first rank",
            f"copy the first rank's file here, or set ATTNPLUG_PROFILE without {_PIN}",
        )


def _read_entries(text: str) -> ProfileContent:
    from attnplug.evidence.profile import merged, parse_entries  # noqa: PLC0415 - as above

    return ProfileContent(entries=merged(parse_entries(text)))


def _read_files(files: Iterable[Path]) -> ProfileContent:
    """Read the files of a folder. One that is no entry is left out, with a note: a torn copy stops no selection."""
    from attnplug.evidence.profile import merged, parse_entries  # noqa: PLC0415 - as above

    entries: list[ProfileEntry] = []
    notes: list[str] = []
    for path in files:
        try:
            entries += parse_entries(read_text(path, _LARGEST_ENTRIES), str(path))
        except (OSError, ValueError) as error:
            notes.append(f"{str(path)!r} is not used: {error}")
    return ProfileContent(entries=merged(entries), notes=tuple(notes))


def _read_tables(path: str, text: str) -> tuple[Table, ...]:
    if len(text) > _LARGEST:
        raise ValueError("it is larger than 1 MiB")
    data = parse_toml(text)
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
        "a profile has the entries that `attnplug tune` writes, or [[measured]] tables with `when` and `microseconds` "
        "(positive, by candidate id)",
        "correct the file, or unset ATTNPLUG_PROFILE",
    )
