"""Names of other backends: of those that are installed here, and of those that core knows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen
from packaging.utils import canonicalize_name

from attnplug import Registry
from attnplug.manifest import locate
from attnplug.negotiation import AUTO
from attnplug.request import Settings
from attnplug_kit.check.report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug import Plugin
    from attnplug.manifest import Manifest


@frozen
class OtherBackend:
    """
    A backend that is installed or known.

    Attributes:
        name: Its name.
        aliases: Its other names.
        distribution: The distribution that offers it.
        installed: Whether it is installed here.
        path: Its manifest, if it has a readable one.
    """

    name: str
    aliases: tuple[str, ...]
    distribution: str
    installed: bool = False
    path: str = ""

    def __str__(self) -> str:
        return f"the backend {self.name!r} of {self.distribution}{'' if self.installed else ', which is known'}"


def other_backends() -> tuple[OtherBackend, ...]:
    """Return every backend that is installed or known. No plugin is imported."""
    registry = Registry.scan(Settings())
    installed = [_installed(plugin) for plugin in registry.plugins]
    names = {each.name for each in installed}
    known = [OtherBackend(p.name, p.aliases, p.install) for p in registry.known if p.name not in names]
    return (*installed, *known)


def _installed(plugin: Plugin) -> OtherBackend:
    manifest = plugin.manifest
    aliases, path = (manifest.aliases, manifest.path) if manifest else ((), "")
    return OtherBackend(plugin.name, aliases, plugin.distribution, installed=True, path=path)


def check_names(
    manifest: Manifest, text: str, distribution: str | None, others: Iterable[OtherBackend]
) -> Iterator[Finding]:
    """
    Yield names that belong to another backend.

    Args:
        manifest: The manifest.
        text: Its text.
        distribution: The distribution that offers it; None if that is unknown, and a backend of the same name may be
            the same one.
        others: The other backends, and perhaps an installed copy of this one.
    """
    line, aliases = (locate(text, ("backend", key)) for key in ("name", "aliases"))
    yield from _check_own(manifest, line, aliases)
    for other in others:
        if not other.path or Path(other.path).resolve() != Path(manifest.path).resolve():
            yield from _check_other(manifest, other, line, aliases, distribution)


def _check_own(manifest: Manifest, line: int | None, aliases: int | None) -> Iterator[Finding]:
    if manifest.name == AUTO:
        yield _finding(manifest, f"name = {AUTO!r}", f"{AUTO!r} in a list of backends permits any other", line)
    for alias in dict.fromkeys(manifest.aliases):
        problem = f"aliases contains {alias!r}"
        if alias in (manifest.name, AUTO) or manifest.aliases.count(alias) > 1:
            yield _finding(manifest, problem, "an alias is another name of this backend, listed once", aliases)
        elif not alias.strip() or set(alias) & set("/, \t"):
            yield _finding(manifest, problem, "a list of names has commas, and a slash precedes a variant", aliases)


def _check_other(
    manifest: Manifest, other: OtherBackend, line: int | None, aliases: int | None, distribution: str | None
) -> Iterator[Finding]:
    problem = f"name = {manifest.name!r}"
    if manifest.name == other.name:
        same = distribution is not None and canonicalize_name(distribution) == canonicalize_name(other.distribution)
        expected = f"a name belongs to one distribution; that is {other}, and neither of two is used"
        found = _finding(manifest, problem, expected, line)
        yield from () if same else (found if distribution is not None else found.note(),)
        return
    if manifest.name in other.aliases:
        yield _finding(manifest, problem, f"it is no other backend's; that is an alias of {other}", line)
    for alias in manifest.aliases:
        if alias in (other.name, *other.aliases):
            kind = "the name" if alias == other.name else "an alias"
            expected = f"it is no other backend's; that is {kind} of {other}, and selects neither of two"
            yield _finding(manifest, f"aliases contains {alias!r}", expected, aliases)


def _finding(manifest: Manifest, problem: str, expected: str, line: int | None) -> Finding:
    return Finding(problem, expected, "choose another name", manifest.path, line)
