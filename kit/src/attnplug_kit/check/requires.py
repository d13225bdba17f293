"""Requirements that no installation meets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from attnplug.manifest import check_requirement, locate
from attnplug_kit.check.finding import Finding
from attnplug_kit.check.versions import contradict, parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from packaging.requirements import Requirement

    from attnplug.manifest import Manifest


def check_requires(manifest: Manifest, text: str) -> Iterator[Finding]:
    """Yield the contradictions among what each variant requires."""
    for variant in manifest.variants:
        where = ("variants", variant.name, "requires")
        yield from _check(variant.requires, manifest.path, locate(text, where))


def check_dependencies(dependencies: Iterable[str], path: str, line: int | None) -> Iterator[Finding]:
    """Yield what pip would refuse among the dependencies of a project."""
    listed = tuple(dependencies)
    for one in listed:
        problem = check_requirement(one)
        if problem:
            yield Finding(
                f"dependencies contains {one!r}", f"it is a PEP 508 requirement: {problem}", "correct it", path, line
            )
    yield from _check([one for one in listed if not check_requirement(one)], path, line)


def _check(requirements: Iterable[str], path: str, line: int | None) -> Iterator[Finding]:
    listed = [(text, found) for text in requirements if (found := parsed(text)) is not None and found.url is None]
    always = [(text, found) for text, found in listed if found.marker is None]
    groups: dict[str, list[tuple[str, Requirement]]] = {}
    for text, found in always:
        groups.setdefault(canonicalize_name(found.name), []).append((text, found))
    alone = [[(text, found)] for text, found in listed if found.marker is not None]
    for group in (*groups.values(), *alone):
        if contradict([found for _, found in group]):
            told = " and ".join(repr(text) for text, _ in group)
            yield Finding(f"{told} required", "no version meets that", "correct the bounds", path, line)
