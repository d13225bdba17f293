"""
What versions a PEP 508 requirement can mean.

Whether a version meets a requirement changes only at the versions that the requirement names. It is enough to look at
those, and just before and after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ENDS: Final = ("0.dev0", "0", "999999")


def parsed(text: str) -> Requirement | None:
    """Return a requirement, or None where it is none."""
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def samples(requirements: Iterable[Requirement]) -> list[Version]:
    """Return versions among which is one of every kind that the requirements tell apart."""
    named = [clause.version.removesuffix(".*") for each in requirements for clause in each.specifier]
    found = [_version(text) for name in named for text in _around(name)]
    return sorted({*filter(None, found), *map(Version, _ENDS)})


def meets(version: Version, requirement: Requirement) -> bool:
    """Whether a version meets a requirement; a version that is under development may."""
    return requirement.specifier.contains(version, prereleases=True)


def contradict(requirements: Iterable[Requirement]) -> bool:
    """Whether no version meets all of these."""
    listed = tuple(requirements)
    return not any(all(meets(version, each) for each in listed) for version in samples(listed))


def follows(requirements: Iterable[Requirement], other: Requirement) -> bool:
    """Whether every version that meets all of these meets another one too."""
    listed = tuple(requirements)
    found = [v for v in samples((*listed, other)) if all(meets(v, each) for each in listed)]
    return bool(listed) and all(meets(version, other) for version in found)


def _around(text: str) -> Iterator[str]:
    """Yield a version, and those next to it."""
    version = _version(text)
    if version is None:
        return
    public = version.public
    yield from (text, public, f"{version.base_version}.dev0", f"{public}.0.0.1", f"{version.base_version}.post9")
    release = list(version.release)
    yield ".".join(map(str, [*release[:-1], release[-1] + 1]))
    yield ".".join(map(str, [release[0] + 1]))
    if version.pre is not None:
        yield f"{version.base_version}{version.pre[0]}{version.pre[1] + 1}"
    yield from _below(release)


def _below(release: list[int]) -> Iterator[str]:
    for place in range(len(release) - 1, -1, -1):
        if release[place]:
            yield ".".join(map(str, [*release[:place], release[place] - 1, 999999]))
            return


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
