"""
PEP 508 requirements against installed distributions, never by import.

`packaging` takes longer to import (13 ms) than all manifests take to parse. Most requirements are a name with simple
bounds, and most installed versions are final releases: those are compared here, and `packaging` reads the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import eq, ge, gt, le, lt, ne
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VersionOf = Callable[[str], "str | None"]
"""Return the installed version of a distribution, or None."""

Finding = Literal["met", "missing", "version"]

_RELEASE = r"[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc)[0-9]+)?"
_SIMPLE = re.compile(
    rf"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:(?:>=|<=|==|!=|<|>)\s*{_RELEASE}\s*(?:,\s*(?=[<>=!])|$))*"
)
_BOUND = re.compile(rf"(>=|<=|==|!=|<|>)\s*({_RELEASE})")
_FINAL = re.compile(r"([0-9]+(?:\.[0-9]+)*)(?:\+[A-Za-z0-9._-]+)?")
_LONGEST = 1000  # characters of a requirement or a version: Python reads no numbers of more than 4,300 digits
_MOST_PARENTHESES = 50  # of a requirement: `packaging` recurses into them, and stacks differ
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {"<": lt, "<=": le, "==": eq, "!=": ne, ">=": ge, ">": gt}


def check_requirement(text: str) -> str:
    """Return what is wrong with a requirement, or an empty text."""
    if len(text) > _LONGEST:
        return f"it has {len(text):,} characters, at most {_LONGEST:,}"
    if _SIMPLE.fullmatch(text):
        return ""
    if text.count("(") > _MOST_PARENTHESES:
        return f"its marker is nested too deeply: it has more than {_MOST_PARENTHESES} parentheses"
    try:
        marker = _parsed(text).marker
        if marker is not None:
            marker.evaluate()  # whether its comparisons are defined is not known before
    except LookupError as error:
        return f"its marker names {error}, which no environment defines"
    except ValueError as error:  # also where a version or a comparison of the marker is invalid
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
        requirement whose environment marker does not apply here is met.
    """
    simple = _SIMPLE.fullmatch(text)
    if simple:
        version = version_of(simple[1])
        met = version is not None and _admits(text, version)
        if met is not None:
            return ("missing", None) if version is None else ("met" if met else "version", version)
    requirement = _parsed(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return "met", None  # as pip sees it, there is nothing to install here
    version = version_of(requirement.name)
    if version is None:
        return "missing", None
    return ("met" if _contains(requirement, version) else "version"), version


def _contains(requirement: Requirement, version: str) -> bool:
    """Whether a requirement admits a version; one that is invalid, or that Python cannot read, meets no bound."""
    try:
        return not requirement.specifier or requirement.specifier.contains(version, prereleases=True)
    except ValueError:  # also InvalidVersion
        return False


def _admits(text: str, version: str) -> bool | None:
    """Compare a version with the bounds of a simple requirement; None where that takes `packaging`."""
    # Only final releases are compared here: their order is that of their numbers, and their local label ("+cpu") plays
    # no part against a bound without one (PEP 440, "Version specifiers").
    here = _FINAL.fullmatch(version) if len(version) <= _LONGEST else None
    bounds = [(compare, _FINAL.fullmatch(bound)) for compare, bound in _BOUND.findall(text)]
    if here is None or not all(bound for _, bound in bounds):
        return None
    return all(_COMPARE[compare](_numbers(here[1]), _numbers(bound[1])) for compare, bound in bounds if bound)


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release without zeros at the end, which mean nothing: 1.0 is 1."""
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


@lru_cache(maxsize=512)
def _parsed(text: str) -> Requirement:
    from packaging.requirements import Requirement  # noqa: PLC0415 - see the module docstring

    return Requirement(text)
