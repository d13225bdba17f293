"""What the settings allow and block: a backend, by name or alias, ``backend/variant``, or a distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.discovery.distribution import normalized
from attnplug.discovery.plugin import KnownPlugin
from attnplug.negotiation.reason import Reason

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
    """

    name: str
    aliases: tuple[str, ...]
    distribution: str
    variants: tuple[str, ...] | None = None

    def is_called(self, name: str, variant: str | None = None) -> bool:
        """
        Whether a name means this backend or, with `variant`, that variant of it.

        A name with a variant never means the backend as a whole.
        """
        backend, _, wanted = name.partition("/")
        if wanted:
            return variant == wanted and backend in (self.name, *self.aliases)
        return backend in (self.name, *self.aliases) or normalized(name) == normalized(self.distribution)

    def is_touched(self, name: str) -> bool:
        """Whether a name means this backend or one of its variants, as far as they are known."""
        _, _, wanted = name.partition("/")
        return self.is_called(name, wanted or None) and not (
            wanted and self.variants is not None and wanted not in self.variants
        )

    def names(self) -> Iterator[str]:
        """Yield every name that means this backend or a part of it."""
        yield from (self.name, *self.aliases, self.distribution)
        yield from (f"{self.name}/{variant}" for variant in self.variants or ())


def identity(plugin: Plugin | KnownPlugin) -> Identity:
    """Return the names of a plugin."""
    if isinstance(plugin, KnownPlugin):
        return Identity(plugin.name, plugin.aliases, plugin.install)
    if plugin.manifest is None:
        return Identity(plugin.name, (), plugin.distribution)
    return Identity(
        plugin.name,
        plugin.manifest.aliases,
        plugin.distribution,
        tuple(variant.name for variant in plugin.manifest.variants),
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
    """Yield (name, source) of allowed or blocked names that mean nothing that is installed or known."""
    identities = tuple(known)
    for setting, listed in (("allow", settings.allow or ()), ("block", settings.block)):
        for name in sorted(listed):
            if not any(each.is_touched(name) for each in identities):
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
    return backend.is_touched(name) if variant is None else backend.is_called(name, variant)


def _source(settings: Settings, setting: str) -> str:
    """Say where a setting comes from, or else which variable would hold it."""
    source = settings.sources.get(setting, "")
    return f"the setting {setting} ({source or _VARIABLES[setting]})"
