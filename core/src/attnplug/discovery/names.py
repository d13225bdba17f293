"""Names of backends: aliases that another one has, registrations that replace each other, errors about names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from attnplug.discovery.candidates import NameConflict, usable_of
from attnplug.errors import DuplicateBackendError, UnknownBackendError, near
from attnplug.negotiation.reason import Reason
from attnplug.request.settings import PAIR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from attnplug.discovery.plugin import KnownPlugin, Plugin
    from attnplug.request.settings import Settings


def drop_foreign_aliases(plugin: Plugin, names: set[str]) -> Plugin:
    """Return a plugin without the aliases that are another backend's name: such a name means that backend."""
    if plugin.manifest is None or names.isdisjoint(plugin.manifest.aliases):
        return plugin
    own = tuple(alias for alias in plugin.manifest.aliases if alias not in names)
    return attrs.evolve(plugin, manifest=attrs.evolve(plugin.manifest, aliases=own))


def under_built_in_names(plugins: Sequence[Plugin], settings: Settings) -> tuple[Plugin, ...]:
    """
    Return plugins, those that claim a name of the built-in backend without it: one that has its name is broken, and
    an alias of it selects the built-in backend. Where the settings exclude the built-in one, its names are free.
    """
    built_in = {p.name: p for p in usable_of((p for p in plugins if p.built_in), settings)}
    aliases = {alias for each in built_in.values() if each.manifest for alias in each.manifest.aliases}
    return tuple(_yielding(plugin, built_in.get(plugin.name), aliases, settings) for plugin in plugins)


def _yielding(plugin: Plugin, owner: Plugin | None, aliases: set[str], settings: Settings) -> Plugin:
    if plugin.built_in or (owner is None and not aliases):
        return plugin
    if owner is None:
        return drop_foreign_aliases(plugin, aliases)
    if not usable_of((plugin,), settings):
        return plugin  # it is excluded already
    conflict = NameConflict(plugin.name, (owner, plugin))
    error = conflict.error()
    reason = Reason("broken", plugin.name, None, error.problem, error.expected)
    return attrs.evolve(plugin, manifest=None, problem=reason, fix=conflict.fix)


def replaces(given: Plugin, plugin: Plugin) -> bool:
    """Whether a plugin is an earlier registration of another one: of its module, by its name or its manifest's file."""
    if not (given.is_by_hand and plugin.is_by_hand and given.module == plugin.module):
        return False
    paths = [each.manifest.path for each in (given, plugin) if each.manifest is not None]
    return given.name == plugin.name or (len(paths) == 2 and paths[0] == paths[1])


def clash(plugin: Plugin, rival: Plugin) -> DuplicateBackendError:
    """Return the error for a registration under a name that another plugin has."""
    from shlex import quote  # noqa: PLC0415 - takes 4 ms, and only errors need it

    owner = f"the module {rival.module!r}, {rival.label}," if rival.is_by_hand else rival.label
    block = (
        "" if rival.is_by_hand else f", or set ATTNPLUG_BLOCK={quote(rival.distribution)} and call attnplug.refresh()"
    )
    return DuplicateBackendError(
        f"the backend {plugin.name!r} of {plugin.module!r} was registered",
        f"{owner} offers {plugin.name!r} already" + ("" if rival.is_by_hand else f", in {rival.module!r}"),
        f"give it another name in its manifest{block}",
    )


def check_pair(name: str) -> tuple[str, str]:
    """
    Return the two names that the name of a routed pair joins.

    Raises:
        UnknownBackendError: It has other than two, or ``auto`` is one of them.
    """
    names = name.split(PAIR)
    if len(names) == 2 and all(names) and "auto" not in names:
        return names[0], names[1]
    raise UnknownBackendError(
        f"the pair {name!r} was requested",
        f"a pair is the backend of pure decodes, {PAIR!r}, and the backend of all other batches",
        f"write 'flashmla{PAIR}flash_attn', for example",
    )


def unknown_backend(
    name: str, names: list[str], installed: Collection[str], known: Iterable[KnownPlugin]
) -> UnknownBackendError:
    """
    Return the error for a name that selects nothing.

    Args:
        name: The name.
        names: What would select something.
        installed: The names of installed backends.
        known: The known plugins, installed or not.
    """
    absent = {plugin.name: plugin for plugin in known if plugin.name not in installed}
    return UnknownBackendError(
        f"the backend {name!r} was requested{near(name, names) if name not in absent else ''}",
        f"installed: {', '.join(sorted(installed)) or 'none'}; known and not installed: {', '.join(absent) or 'none'}",
        str(absent[name].fix) if name in absent else "correct the name, or install the distribution that offers it",
    )
