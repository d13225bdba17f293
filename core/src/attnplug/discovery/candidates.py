"""Candidates, from plugins and settings: which are ready, and why the others are not."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from attnplug.discovery.distribution import normalized
from attnplug.discovery.permission import deny, identity
from attnplug.discovery.plugin import broken, reading
from attnplug.errors import AttnplugError, DuplicateBackendError, ManifestError
from attnplug.negotiation.candidate import Candidate, make_candidate
from attnplug.negotiation.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnplug.discovery.plugin import KnownPlugin, Plugin
    from attnplug.manifest.installed import VersionOf
    from attnplug.manifest.schema import Manifest
    from attnplug.request.settings import Settings


@frozen
class NameConflict:
    """
    One name that several distributions claim.

    Attributes:
        name: The name, or the alias.
        claimants: Their plugins, none of which the settings exclude.
    """

    name: str
    claimants: tuple[Plugin, ...]

    def error(self) -> DuplicateBackendError:
        """Return it as an exception."""
        return DuplicateBackendError(
            f"the backend {self.name!r} is offered by {self.labels}",
            "a name belongs to one distribution, and the built-in backend keeps its own"
            if any(plugin.built_in for plugin in self.claimants)
            else "a name belongs to one distribution, and none of them wins silently",
            self.fix,
        )

    @property
    def labels(self) -> str:
        """The distributions, with their versions."""
        return " and by ".join(plugin.label for plugin in self.claimants)

    @property
    def fix(self) -> str:
        """How to choose one of them."""
        from shlex import quote  # noqa: PLC0415 - takes 4 ms, and only conflicts need it

        names = dict.fromkeys(plugin.distribution for plugin in self.claimants if not plugin.is_by_hand)
        by_hand = [plugin.module for plugin in self.claimants if plugin.is_by_hand]
        if by_hand:
            block = f", or set ATTNPLUG_BLOCK={quote(','.join(names))} to keep it" if names else ""
            return f"register {by_hand[0]!r} under another name{block}"
        if len(names) == 1:
            return f"install {next(iter(names))!r} again, in a version that offers {self.name!r} once"
        choices = (
            f"ATTNPLUG_BLOCK={quote(','.join(other for other in names if other != name))} to keep {name!r}"
            for name in names
        )
        return f"block the others by their distributions, or uninstall them: set {', or '.join(choices)}"


@frozen
class Candidates:
    """
    Every candidate under some settings.

    Attributes:
        candidates: By backend, then distribution, then in the manifest's order.
        aliases: Aliases that several backends claim; such an alias selects none of them.
    """

    candidates: tuple[Candidate, ...]
    aliases: Mapping[str, NameConflict]


def list_candidates(
    plugins: Iterable[Plugin],
    known: Iterable[KnownPlugin],
    settings: Settings,
    version_of: VersionOf,
    *,
    assume_installed: bool,
) -> Candidates:
    """
    Make the candidates.

    Args:
        plugins: What is installed.
        known: What is known by name; those that are not installed become absent candidates.
        settings: Allow and block lists, and whether problems are raised.
        version_of: The installed version of a distribution, or None.
        assume_installed: Suppose that everything the variants require is installed.

    Raises:
        ManifestError: Under the strict setting, a plugin that may be used has a problem.
        DuplicateBackendError: Likewise, two of them have one name.
    """
    # Plugins of one name are looked at together: only one of them may be used.
    groups = {
        name: tuple(group) for name, group in groupby(sorted(plugins, key=_place), key=lambda plugin: plugin.name)
    }
    usable = {name: usable_of(group, settings) for name, group in groups.items()}
    if settings.strict:
        _raise_first(usable)
    aliases = _contested_aliases([plugin for group in usable.values() for plugin in group])
    found = [
        c
        for name, group in groups.items()
        for c in _of_name(group, usable[name], settings, version_of, assume_installed=assume_installed)
    ]
    found += [_absent(plugin, settings) for plugin in known if plugin.name not in groups]
    # An alias that several backends claim, or that is the name of another, selects none of them.
    candidates = (
        attrs.evolve(c, aliases=tuple(a for a in c.aliases if a not in aliases and a not in groups))
        if c.aliases and not c.built_in
        else c
        for c in found
    )
    return Candidates(tuple(sorted(candidates, key=lambda c: c.backend)), aliases)


def usable_of(plugins: Iterable[Plugin], settings: Settings) -> tuple[Plugin, ...]:
    """Return the plugins that the settings do not exclude as a whole."""
    return tuple(plugin for plugin in plugins if deny(settings, identity(plugin)) is None)


def sole_owner(usable: tuple[Plugin, ...]) -> Plugin | None:
    """Return the plugin of one name that may be used: the only one, or the built-in one, which no other disables."""
    return usable[0] if len(usable) == 1 else next((plugin for plugin in usable if plugin.built_in), None)


def _place(plugin: Plugin) -> tuple[str, str, str]:
    return plugin.name, normalized(plugin.distribution), plugin.module


def _raise_first(usable: Mapping[str, tuple[Plugin, ...]]) -> None:
    errors: list[AttnplugError] = [
        plugin.error for group in usable.values() for plugin in group if plugin.error is not None
    ]
    errors += [NameConflict(name, group).error() for name, group in usable.items() if len(group) > 1]
    if errors:
        raise errors[0]


def _contested_aliases(plugins: Iterable[Plugin]) -> dict[str, NameConflict]:
    claims: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        for alias in dict.fromkeys(plugin.manifest.aliases if plugin.manifest else ()):
            claims.setdefault(alias, []).append(plugin)
    return {
        alias: NameConflict(alias, tuple(group))
        for alias, group in claims.items()
        if len({plugin.name for plugin in group}) > 1
    }


def _of_name(
    group: tuple[Plugin, ...],
    usable: tuple[Plugin, ...],
    settings: Settings,
    version_of: VersionOf,
    *,
    assume_installed: bool,
) -> Iterator[Candidate]:
    owner = sole_owner(usable)
    if len(usable) > 1 and owner is None:
        yield _duplicate(NameConflict(group[0].name, usable))
    for plugin in group:
        if len(group) == 1 or plugin is owner:
            yield from _of_plugin(plugin, settings, version_of, assume_installed=assume_installed)
        elif plugin not in usable or owner is not None:
            yield _unread(plugin, settings)  # without its variants, whose ids belong to the plugin that is used


def _of_plugin(plugin: Plugin, settings: Settings, version_of: VersionOf, *, assume_installed: bool) -> list[Candidate]:
    """Return the candidates of a plugin. What its comparison with what is installed raises becomes its problem."""
    if plugin.manifest is None:
        return [_unread(plugin, settings)]
    try:
        with reading(f"comparing {plugin.manifest.path!r} with what is installed"):
            return list(_of_manifest(plugin, plugin.manifest, settings, version_of, assume_installed=assume_installed))
    except ManifestError as error:
        if settings.strict and deny(settings, identity(plugin)) is None:
            raise
        return [_unread(broken(plugin, error), settings)]


def _of_manifest(
    plugin: Plugin, manifest: Manifest, settings: Settings, version_of: VersionOf, *, assume_installed: bool
) -> Iterator[Candidate]:
    names = identity(plugin)
    for variant in manifest.variants:
        candidate = make_candidate(
            manifest,
            variant,
            version_of,
            built_in=plugin.built_in,
            distribution=plugin.label,
            assume_installed=assume_installed,
        )
        denial = deny(settings, names, variant.name)
        if denial is not None:
            candidate = attrs.evolve(
                candidate,
                availability="refused",
                reasons=(denial.reason, *candidate.reasons),
                fix="; ".join(filter(None, (denial.fix, candidate.fix))),
            )
        yield candidate


def _unread(plugin: Plugin, settings: Settings) -> Candidate:
    """Return the one candidate of a plugin whose variants cannot be used."""
    denial = deny(settings, identity(plugin))
    reasons = ((denial.reason,) if denial else ()) + ((plugin.problem,) if plugin.problem else ())
    # A blocked plugin is refused, whatever is wrong with it: the user has excluded it already.
    refused = denial is not None or (plugin.problem is not None and plugin.problem.code == "api")
    return Candidate(
        id=plugin.name,
        backend=plugin.name,
        availability="refused" if refused else "broken",
        reasons=reasons,
        fix="; ".join(filter(None, (denial.fix if denial else "", plugin.fix))),
        built_in=plugin.built_in,
        distribution=plugin.label,
    )


def _duplicate(conflict: NameConflict) -> Candidate:
    error = conflict.error()
    return Candidate(
        id=conflict.name,
        backend=conflict.name,
        aliases=tuple(dict.fromkeys(alias for p in conflict.claimants if p.manifest for alias in p.manifest.aliases)),
        availability="broken",
        reasons=(Reason("broken", conflict.name, None, error.problem, error.expected),),
        fix=conflict.fix,
        distribution=", ".join(plugin.label for plugin in conflict.claimants),
    )


def _absent(plugin: KnownPlugin, settings: Settings) -> Candidate:
    denial = deny(settings, identity(plugin))
    missing = Reason("absent", plugin.name, None, f"{plugin.name!r} is not installed", plugin.summary)
    return Candidate(
        id=plugin.name,
        backend=plugin.name,
        aliases=plugin.aliases,
        availability="absent",
        reasons=(missing, denial.reason) if denial else (missing,),
        install=plugin.fix.install,
        fix="; ".join(filter(None, (plugin.fix.action, denial.fix if denial else ""))),
    )
