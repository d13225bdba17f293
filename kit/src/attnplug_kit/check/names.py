"""Names that others have: of backends that are installed here, and of those that are known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen
from packaging.utils import canonicalize_name

from attnplug import Registry
from attnplug.manifest import locate
from attnplug.negotiation import AUTO
from attnplug.request import Settings
from attnplug_kit.check.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug import Plugin
    from attnplug.manifest import Manifest


@frozen
class Taken:
    """
    A backend elsewhere.

    Attributes:
        name: Its name.
        aliases: Its other names.
        distribution: The distribution that offers it.
        installed: Whether it is installed here.
        path: Its manifest, where there is one to read.
    """

    name: str
    aliases: tuple[str, ...]
    distribution: str
    installed: bool = False
    path: str = ""

    def __str__(self) -> str:
        return f"the backend {self.name!r} of {self.distribution}{'' if self.installed else ', which is known'}"


def taken() -> tuple[Taken, ...]:
    """Return every backend that is installed or known. Nothing of them is imported."""
    registry = Registry.scan(Settings())
    installed = [_installed(plugin) for plugin in registry.plugins]
    names = {each.name for each in installed}
    known = [Taken(p.name, p.aliases, p.install) for p in registry.known if p.name not in names]
    return (*installed, *known)


def check_names(manifest: Manifest, text: str, distribution: str | None, others: Iterable[Taken]) -> Iterator[Finding]:
    """
    Yield names that somebody else has.

    Args:
        manifest: The manifest.
        text: Its text.
        distribution: The distribution that offers it; None where that is not known, and a backend of the same name
            may be the same one.
        others: The other backends, and perhaps an installed copy of this one.
    """
    line = locate(text, ("backend", "name"))
    aliases = locate(text, ("backend", "aliases"))
    yield from _check_own(manifest, line, aliases)
    for other in others:
        if other.path and Path(other.path).resolve() == Path(manifest.path).resolve():
            continue
        same = distribution is not None and canonicalize_name(distribution) == canonicalize_name(other.distribution)
        if manifest.name == other.name:
            if not same:
                yield _same_name(manifest, other, line, sure=distribution is not None)
        elif manifest.name in other.aliases:
            yield _finding(manifest, f"name = {manifest.name!r}", f"that is an alias of {other}", line)
        if manifest.name != other.name:
            for alias in manifest.aliases:
                if alias == other.name or alias in other.aliases:
                    kind = "the name" if alias == other.name else "an alias"
                    expected = f"that is {kind} of {other}, and would select neither by that name"
                    yield _finding(manifest, f"aliases contains {alias!r}", expected, aliases)


def _installed(plugin: Plugin) -> Taken:
    manifest = plugin.manifest
    told = (manifest.aliases, manifest.path) if manifest else ((), "")
    return Taken(plugin.name, told[0], plugin.distribution, installed=True, path=told[1])


def _check_own(manifest: Manifest, line: int | None, aliases: int | None) -> Iterator[Finding]:
    if manifest.name == AUTO:
        yield _finding(manifest, f"name = {AUTO!r}", f"{AUTO!r} in a list of backends permits any other", line)
    for alias in dict.fromkeys(manifest.aliases):
        given = f"aliases contains {alias!r}"
        if alias in (manifest.name, AUTO) or manifest.aliases.count(alias) > 1:
            yield _finding(manifest, given, "an alias is another name of this backend, listed once", aliases)
        elif not alias.strip() or set(alias) & set("/, \t"):
            yield _finding(manifest, given, "names are listed with commas, and a slash leads to a variant", aliases)


def _same_name(manifest: Manifest, other: Taken, line: int | None, *, sure: bool) -> Finding:
    found = _finding(
        manifest,
        f"name = {manifest.name!r}",
        f"that is {other}; a name belongs to one distribution, and none of two wins",
        line,
    )
    return found if sure else found.note()


def _finding(manifest: Manifest, given: str, expected: str, line: int | None) -> Finding:
    return Finding(given, expected, "choose another name", manifest.path, line)
