"""
What the settings allow and block: a backend, by name or alias, ``backend/variant``, or a distribution; in every
version, or in those that an entry such as ``name==1.0`` means.

Names are compared normalized (PEP 503). Only an alias is allowed as it is written: by the alias ``Torch`` a plugin
would be allowed wherever ``torch`` is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.discovery.distribution import normalized
from attnplug.discovery.plugin import KnownPlugin
from attnplug.negotiation.reason import Reason
from attnplug.request.entries import split_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug.discovery.plugin import Plugin
    from attnplug.request.settings import Settings

_VARIABLES = {"allow": "ATTNPLUG_ALLOW", "block": "ATTNPLUG_BLOCK"}


@frozen
class Identity:
    """
    The names by which a setting may mean a backend.

    Attributes:
        name: The backend's name.
        aliases: Its other names.
        distribution: Its distribution.
        variants: Its variants; None where they are not known.
        version: The version of its distribution; None where it is not installed, empty where it is not known.
    """

    name: str
    aliases: tuple[str, ...]
    distribution: str
    variants: tuple[str, ...] | None = None
    version: str | None = None

    def is_called(self, entry: str, variant: str | None = None, *, blocking: bool = True) -> bool:
        """
        Whether an entry means this backend or, with `variant`, that variant of it.

        A name with a variant never means the backend as a whole. In doubt a block list means it, an allow list not.
        """
        name, bounds = split_version(entry)
        if bounds and not self._has_version(bounds, blocking=blocking):
            return False
        backend, _, wanted = name.partition("/")
        is_named = self._is_named(backend, blocking=blocking)
        if wanted:
            return is_named and variant is not None and normalized(variant) == normalized(wanted)
        return is_named or normalized(name) == normalized(self.distribution)

    def _is_named(self, name: str, *, blocking: bool) -> bool:
        names = (self.name, *self.aliases) if blocking else (self.name,)
        return name in self.aliases or normalized(name) in map(normalized, names)

    def _has_version(self, bounds: str, *, blocking: bool) -> bool:
        if self.version is None:
            return not blocking  # nothing of it can run; whichever version is installed is looked at then
        from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - few lists have versions
        from packaging.version import Version  # noqa: PLC0415 - likewise

        try:
            return SpecifierSet(bounds).contains(Version(self.version), prereleases=True)
        except ValueError:
            return blocking  # a version that cannot be read may be the one that is meant

    def is_touched(self, entry: str, *, blocking: bool = True) -> bool:
        """Whether an entry means this backend or one of its variants, as far as they are known."""
        _, _, wanted = entry.partition("/")
        known = self.variants is None or normalized(wanted) in map(normalized, self.variants)
        return self.is_called(entry, wanted or None, blocking=blocking) and (known or not wanted)

    def names(self) -> Iterator[str]:
        """Yield every name that means this backend or a part of it."""
        yield from (self.name, *self.aliases, self.distribution)
        yield from (f"{self.name}/{variant}" for variant in self.variants or ())


def identity(plugin: Plugin | KnownPlugin) -> Identity:
    """Return the names of a plugin."""
    if isinstance(plugin, KnownPlugin):
        return Identity(plugin.name, plugin.aliases, plugin.install)
    if plugin.manifest is None:
        return Identity(plugin.name, (), plugin.distribution, version=plugin.version)
    return Identity(
        plugin.name,
        plugin.manifest.aliases,
        plugin.distribution,
        tuple(variant.name for variant in plugin.manifest.variants),
        plugin.version,
    )


@frozen
class Denial:
    """Why the settings exclude something, and what to change in them."""

    reason: Reason
    fix: str


def deny(settings: Settings, backend: Identity, variant: str | None = None) -> Denial | None:
    """
    Return why a backend, or one variant of it, may not be used, or None.

    Without `variant` this is about the backend as a whole: one of which some variant may be used may be used.
    """
    faults = [fault for fault in (_blocked(settings, backend, variant), _unlisted(settings, backend, variant)) if fault]
    if not faults:
        return None
    subject = backend.name if variant is None else f"{backend.name}/{variant}"
    because, fix = ("; ".join(texts) for texts in zip(*faults, strict=True))
    return Denial(Reason("blocked", subject, None, f"the settings exclude {subject!r}", because), fix)


def unknown_names(settings: Settings, known: Iterable[Identity]) -> Iterator[tuple[str, str]]:
    """Yield (name, source) of allowed or blocked names that mean nothing that is installed or known, in any version."""
    identities = tuple(known)
    for setting, listed in (("allow", settings.allow or ()), ("block", settings.block)):
        for name in sorted(listed):
            blocking = setting == "block"
            if not any(each.is_touched(split_version(name)[0], blocking=blocking) for each in identities):
                yield name, _source(settings, setting)


def _blocked(settings: Settings, backend: Identity, variant: str | None) -> tuple[str, str] | None:
    """Return what is wrong with the block list, and the fix."""
    blocking = sorted(name for name in settings.block if backend.is_called(name, variant))
    if not blocking:
        return None
    listed, source = ", ".join(map(repr, blocking)), _source(settings, "block")
    return f"{listed} is in {source}", f"remove {listed} from {source}"


def _unlisted(settings: Settings, backend: Identity, variant: str | None) -> tuple[str, str] | None:
    """Return what is wrong with the allow list, and the fix."""
    if settings.allow is None or any(_admits(name, backend, variant) for name in settings.allow):
        return None
    listed, source = ", ".join(map(repr, sorted(settings.allow))), _source(settings, "allow")
    return (
        f"{source} allows {listed or 'nothing at all, not even the built-in backend'}",
        f"add {backend.name!r} to {source}",
    )


def _admits(name: str, backend: Identity, variant: str | None) -> bool:
    if variant is None:
        return backend.is_touched(name, blocking=False)
    return backend.is_called(name, variant, blocking=False)


def _source(settings: Settings, setting: str) -> str:
    """Say where a setting comes from, or else which variable would hold it."""
    source = settings.sources.get(setting, "")
    return f"the setting {setting} ({source or _VARIABLES[setting]})"
