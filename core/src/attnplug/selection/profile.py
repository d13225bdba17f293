"""
Measured times: the user's own evidence, which ranks above every default order.

A profile is a TOML file of tables

    [[measured]]
    when = { device_name = "NVIDIA H200", head_size = 128 }
    microseconds = { "flash_attn/fa3" = 286, "flashinfer/fa2" = 334 }
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug.errors import ManifestError, SettingsError
from attnplug.manifest.conditions import parse_conditions
from attnplug.manifest.schema import Condition
from attnplug.request.toml import parse_toml

if TYPE_CHECKING:
    from attnplug.negotiation.negotiate import Question

Table = tuple[tuple[Condition, ...], Mapping[str, float]]


def measured(path: str | None, question: Question) -> Mapping[str, float]:
    """
    Return microseconds by candidate id, from the first table of the profile whose conditions hold.

    Raises:
        SettingsError: The file cannot be read or is not a profile.
    """
    for when, times in read_profile(path) if path else ():
        if all(condition.holds(question.facts, question.names, frozenset(), absent=False) for condition in when):
            return times
    return {}


@lru_cache(maxsize=8)
def read_profile(path: str) -> tuple[Table, ...]:
    """
    Read a profile, once.

    Raises:
        SettingsError: As for `measured`.
    """
    try:
        data = parse_toml(Path(path).read_text(encoding="utf-8"))
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
    if not isinstance(times, Mapping) or not all(type(time) in (int, float) and time > 0 for time in times.values()):
        raise _malformed(path, f"microseconds = {times!r}")
    try:
        return parse_conditions(
            lambda _, given, allowed, remedy: ManifestError(given, allowed, remedy, path), table.get("when", {}), ()
        ), times
    except ManifestError as error:
        raise SettingsError(f"the profile {path!r} is set: {error.given}", error.allowed, error.remedy) from error


def _malformed(path: str, found: str) -> SettingsError:
    return SettingsError(
        f"the profile {path!r} is set: {found}",
        "a profile is a list of [[measured]] tables with `when` and `microseconds` (positive, by candidate id)",
        "correct the file, or unset ATTNPLUG_PROFILE",
    )
