"""
PEP 508 requirements: what versions they mean, and which of them no installation meets.

Whether a version meets a requirement changes only at the versions that the requirement names. So it is enough to try
those, and the ones just before and after them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from attnplug.manifest import check_requirement, locate
from attnplug_kit.check.report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug.manifest import Manifest

_ENDS: Final = ("0.dev0", "0", "999999")


def check_requires(manifest: Manifest, text: str) -> Iterator[Finding]:
    """Yield the contradictions in the requirements of each variant."""
    for variant in manifest.variants:
        yield from _contradictions(
            variant.requires, manifest.path, locate(text, ("variants", variant.name, "requires"))
        )


def check_dependencies(dependencies: Iterable[str], path: str, line: int | None) -> Iterator[Finding]:
    """Yield what pip would refuse in the dependencies of a project."""
    valid = []
    for one in dependencies:
        problem = check_requirement(one)
        if problem:
            expected = f"it is a PEP 508 requirement: {problem}"
            yield Finding(f"dependencies contains {one!r}", expected, "correct it", path, line)
        else:
            valid.append(one)
    yield from _contradictions(valid, path, line)


def _contradictions(requirements: Iterable[str], path: str, line: int | None) -> Iterator[Finding]:
    groups: dict[str, list[Requirement]] = {}
    for found in filter(None, map(parsed, requirements)):
        if found.url is None:  # one with an environment marker may not apply: it is checked by itself
            groups.setdefault(str(found) if found.marker else canonicalize_name(found.name), []).append(found)
    for group in groups.values():
        if contradict(group):
            names = " and ".join(repr(text) for text in requirements if parsed(text) in group)
            yield Finding(f"{names} required", "some version meets all of them", "correct the bounds", path, line)


def parsed(text: str) -> Requirement | None:
    """Return a requirement, or None where it is invalid."""
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def contradict(requirements: Iterable[Requirement]) -> bool:
    """Whether no version meets all of these."""
    listed = tuple(requirements)
    return not any(all(meets(version, each) for each in listed) for version in samples(listed))


def follows(requirements: Iterable[Requirement], other: Requirement) -> bool:
    """Whether every version that meets all of these meets another one too."""
    listed = tuple(requirements)
    found = [v for v in samples((*listed, other)) if all(meets(v, each) for each in listed)]
    return bool(listed) and all(meets(version, other) for version in found)


def meets(version: Version, requirement: Requirement) -> bool:
    """Whether a version meets a requirement; pre-releases may."""
    return requirement.specifier.contains(version, prereleases=True)


def samples(requirements: Iterable[Requirement]) -> list[Version]:
    """Return versions, with at least one in every range between the versions that the requirements name."""
    named = [clause.version.removesuffix(".*") for each in requirements for clause in each.specifier]
    found = [_version(text) for name in named for text in _around(name)]
    return sorted({*filter(None, found), *map(Version, _ENDS)})


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
    last = next((place for place in range(len(release) - 1, -1, -1) if release[place]), None)
    if last is not None:
        yield ".".join(map(str, [*release[:last], release[last] - 1, 999999]))


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
