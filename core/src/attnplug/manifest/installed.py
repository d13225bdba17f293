"""
PEP 508 requirements against installed distributions, never by import.

`packaging` takes longer to import than a whole manifest takes to parse, and most requirements are a name with simple
bounds. Such a requirement is recognised
here without it; `packaging` decides versions whenever a named distribution is installed, and reads every requirement
with another form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VersionOf = Callable[[str], "str | None"]
"""Return the installed version of a distribution, or None."""

Finding = Literal["met", "missing", "version"]

_RELEASE = r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?"
_SIMPLE = re.compile(
    rf"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:(?:>=|<=|==|!=|<|>|~=)\s*{_RELEASE}\s*(?:,\s*(?=[<>=!~])|$))*"
)


def check_requirement(text: str) -> str:
    """Return what is wrong with a requirement, or an empty text."""
    if _SIMPLE.fullmatch(text):
        return ""
    from packaging.requirements import InvalidRequirement  # noqa: PLC0415 - see the module docstring

    try:
        _parsed(text)
    except InvalidRequirement as error:
        return str(error).splitlines()[0]
    return ""


def requirement_name(text: str) -> str:
    """Return the distribution that a valid requirement names."""
    simple = _SIMPLE.fullmatch(text)
    return simple[1] if simple else _parsed(text).name


def find(text: str, version_of: VersionOf) -> tuple[Finding, str | None]:
    """
    Compare a valid requirement with what is installed.

    Returns:
        ``"met"``, ``"missing"`` or ``"version"`` (installed in another version), and the installed version. A
        requirement whose environment marker does not
        apply here is met.
    """
    simple = _SIMPLE.fullmatch(text)
    version = version_of(simple[1]) if simple else None
    if simple and (version is None or simple[0].strip() == simple[1]):
        return ("missing", None) if version is None else ("met", version)
    requirement = _parsed(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return "met", None
    version = version_of(requirement.name)
    if version is None:
        return "missing", None
    return ("met" if requirement.specifier.contains(version, prereleases=True) else "version"), version


@lru_cache(maxsize=512)
def _parsed(text: str) -> Requirement:
    from packaging.requirements import Requirement  # noqa: PLC0415 - see the module docstring

    return Requirement(text)
