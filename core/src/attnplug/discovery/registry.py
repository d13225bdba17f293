"""The backends of one process: what is installed, what was registered by hand, what has failed or was refused."""

from __future__ import annotations

import logging
import os
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import field, frozen

from attnplug._escape import escaped
from attnplug._html import block, table
from attnplug.discovery.candidates import Candidates, NameConflict, list_candidates, sole_owner, usable_of
from attnplug.discovery.names import (
    check_pair,
    clash,
    drop_foreign_aliases,
    replaces,
    under_built_in_names,
    unknown_backend,
)
from attnplug.discovery.permission import Identity, identity, unknown_names
from attnplug.discovery.plugin import Known, KnownPlugin, Plugin, read_known, read_plugins
from attnplug.discovery.scan import Diagnostic, scan
from attnplug.errors import RegistryError, UnknownBackendError, near
from attnplug.manifest.schema import CONTRACT_API, Manifest
from attnplug.negotiation.ranking import AUTO, DefaultOrder
from attnplug.request.settings import Settings, names_of_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from attnplug.manifest.installed import VersionOf
    from attnplug.manifest.schema import Option
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.probe_refusals import ProbeRefusal, ProbeRefusals
    from attnplug.negotiation.reason import Reason

_log: Final = logging.getLogger("attnplug")
_generations: Final = count(1)  # shared by all registries: a generation is never that of another one's state
_lock = RLock()


@frozen(eq=False)
class _Content:
    """
    What a registry holds at one time. It is replaced as a whole, by one operation that nothing interrupts: an interrupt
    leaves the old or the new one, and a signal handler that registers during a registration loses neither.

    Attributes:
        given: The plugins as they were given.
        plugins: The plugins under the names that they may have.
        failures: What has failed, by candidate.
        refusals: What probes have refused of single requests or devices, by candidate.
        generation: A number that no other content of this process has.
        lists: The candidates under settings that were asked for.
        after: The content that has replaced this one; empty in the newest.
    """

    given: tuple[Plugin, ...]
    plugins: tuple[Plugin, ...]
    failures: Mapping[str, tuple[Reason, str]] = field(factory=dict)
    refusals: Mapping[str, ProbeRefusals] = field(factory=dict)
    generation: int = field(factory=_generations.__next__, init=False)
    lists: dict[Hashable, Candidates] = field(factory=dict, init=False)
    after: dict[None, _Content] = field(factory=dict, init=False)


class Registry:
    """
    A list of plugins, and their candidates under given settings. Safe to use from several threads.

    Args:
        plugins: The plugins, in any order.
        notes: What was odd about finding them.
        known: What is known of absent ones; the content of ``known.toml`` by default.
        version_of: The installed version of a distribution; looked up in this environment by default.
        settings: The settings under which `plugin` distinguishes duplicates.
    """

    def __init__(
        self,
        plugins: Iterable[Plugin],
        notes: Iterable[Diagnostic] = (),
        known: Known | None = None,
        version_of: VersionOf | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._found_notes = tuple(notes)
        self._known = read_known() if known is None else known
        self._version_of = version_of
        self._settings = attrs.evolve(settings or Settings(), strict=False)  # look-ups by name never raise a neighbor's
        self._warned: set[tuple[str, str]] = set()
        given = tuple(plugins)
        self._last_seen = _Content(given, self._named(given))

    @classmethod
    def scan(cls, settings: Settings, by_hand: Iterable[Plugin] = ()) -> Registry:
        """
        Look at what is installed. No plugin's code runs.

        Args:
            settings: As for the registry.
            by_hand: Plugins that were registered before, and stay.

        Raises:
            ManifestError: Under the strict setting, a plugin that may be used has a problem.
            DuplicateBackendError: Likewise, two of them have one name.
        """
        found = scan()
        plugins = (*read_plugins(found.entries), *by_hand)
        registry = cls(plugins, found.notes, version_of=found.version_of, settings=settings)
        registry.candidates(settings)
        return registry

    def __reduce__(self) -> tuple[Any, ...]:
        raise RegistryError(
            "a Registry was copied or pickled",
            "it is what is installed in its process, and has no meaning in another",
            "call attnplug.registry() there; a Selection or a Plan can be sent",
        )

    def __repr__(self) -> str:
        plugins = self.plugins
        names = ", ".join(sorted({plugin.name for plugin in plugins}))
        return escaped(f"<Registry: {len(plugins)} plugins ({names})>")

    def _repr_html_(self) -> str:
        """Return what a notebook shows: each candidate with its availability, and what is missing."""
        rows = [
            (
                candidate.id,
                candidate.availability.replace("_", " "),
                candidate.distribution,
                (*map(str, candidate.reasons), *([candidate.fix] if candidate.fix else [])),
            )
            for candidate in self.candidates()
        ]
        notes = table(("note about this environment",), [(str(note),) for note in self.notes])
        heads = ("candidate", "availability", "distribution", "what is missing, and the fix")
        return block(repr(self)[1:-1], (), table(heads, rows), notes)

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Every plugin: usable, blocked and broken."""
        return self._content.plugins

    @property
    def by_hand(self) -> tuple[Plugin, ...]:
        """Those that were registered by hand, as given."""
        return tuple(plugin for plugin in self._content.given if plugin.is_by_hand)

    @property
    def notes(self) -> tuple[Diagnostic, ...]:
        """What is odd about the installation and does no harm."""
        content = self._content
        newer = (
            Diagnostic(p.label, "api", _newer(p.manifest))
            for p in content.plugins
            if p.manifest and p.manifest.is_newer
        )
        aliases = (
            Diagnostic(alias, "alias", f"is claimed by {conflict.labels}, and selects none of them")
            for alias, conflict in self._conflicts().items()
        )
        borrowed = (
            Diagnostic(
                alias, "alias", f"is the name of another backend, and does not select {given.name!r} ({given.label})"
            )
            for given, plugin in zip(content.given, content.plugins, strict=True)
            if given.manifest and plugin.manifest
            for alias in given.manifest.aliases
            if alias not in plugin.manifest.aliases
        )
        unread = (
            Diagnostic(place, "settings", f"cannot be looked for, and no settings are read from it: {why}")
            for place, why in self._settings.unread
        )
        return (*self._found_notes, *newer, *aliases, *borrowed, *unread)

    @property
    def generation(self) -> int:
        """A number that no other state of any registry of this process has."""
        content = self._last_seen
        return self._content.generation if content.after else content.generation  # of every repeated decision

    @property
    def known(self) -> tuple[KnownPlugin, ...]:
        """The plugins that this core knows by name, installed or not."""
        return self._known.plugins

    @property
    def default_orders(self) -> tuple[DefaultOrder, ...]:
        """The known orders of backends, per device."""
        return self._known.orders

    def version_of(self, distribution: str) -> str | None:
        """Return the installed version of a distribution, or None."""
        if self._version_of is None:
            self._version_of = scan().version_of
        return self._version_of(distribution)

    def candidates(self, settings: Settings | None = None, *, assume_installed: bool = False) -> tuple[Candidate, ...]:
        """
        Return every variant of every plugin, and the known plugins that are absent, by backend.

        Args:
            settings: Allow and block lists, and whether problems are raised; None is what the registry was made with.
            assume_installed: Suppose that everything the variants require is installed.

        Raises:
            ManifestError: Under the strict setting, a plugin that may be used has a problem.
            DuplicateBackendError: Likewise, two of them have one name.
        """
        return self._listed(settings or self._settings, assume_installed=assume_installed).candidates

    def device_types(self) -> tuple[str, ...]:
        """Return the device types that manifests declare."""
        variants = (variant for p in self.plugins if p.manifest is not None for variant in p.manifest.variants)
        declared = (variant.supports.get("device_type") for variant in variants)
        return tuple(sorted({name for each in declared if each is not None for name in each.members()}))

    def plugin(self, name: str) -> Plugin:
        """
        Return the plugin of a backend, by its name.

        Raises:
            UnknownBackendError: It is not installed.
            DuplicateBackendError: Several distributions offer it, and the settings do not choose.
        """
        group = tuple(plugin for plugin in self.plugins if plugin.name == name)
        if not group:
            raise self._unknown(name)
        usable = usable_of(group, self._settings) or group
        owner = sole_owner(usable)
        if owner is None:
            raise NameConflict(name, usable).error()
        return owner

    def check_name(self, name: str) -> None:
        """
        Check that a name selects something: a backend or an alias, alone or with a variant, or ``auto``; or a routed
        pair of two backends, joined by ``+``.

        Raises:
            UnknownBackendError: Nothing installed or known has this name.
            DuplicateBackendError: It is an alias that several backends claim.
        """
        if names_of_pair(name) is not None:
            for one in check_pair(name):
                self.check_name(one)
            return
        backend, _, variant = name.partition("/")
        called = [each for each in self._identities() if backend in (each.name, *each.aliases)]
        if name != AUTO and not called:
            raise self._unknown(name)
        conflict = self._conflicts().get(backend)
        if conflict is not None and all(each.name != backend for each in called):
            raise conflict.error()
        declared = {own for each in called for own in each.variants or ()}
        if variant and declared and variant not in declared:
            raise UnknownBackendError(
                f"the backend {name!r} was requested{near(variant, declared)}",
                f"{backend!r} has the variants {', '.join(sorted(declared))}",
                f"name one of them, or {backend!r} alone",
            )

    def options(self, name: str | None = None) -> Mapping[str, Mapping[str, Option]]:
        """
        Return what can be set for installed backends: by backend, the options with type, bounds, default and meaning.

        Args:
            name: One backend, or an alias of it; None for all of them.

        Raises:
            UnknownBackendError: Nothing installed or known has this name.
            DuplicateBackendError: It is an alias that several backends claim.
        """
        if name is not None:
            self.check_name(name)
        return {
            manifest.name: manifest.options
            for plugin in sorted(self.plugins, key=lambda plugin: plugin.name)
            if (manifest := plugin.manifest) is not None and name in (None, manifest.name, *manifest.aliases)
        }

    @property
    def refusals(self) -> Mapping[str, ProbeRefusals]:
        """What probes have refused of single requests or devices, by candidate."""
        return self._content.refusals

    def mark_broken(self, candidate_id: str, reason: Reason, fix: str = "") -> None:
        """
        Record that a candidate has failed. From now on it is broken in this process.

        Args:
            candidate_id: ``backend/variant``.
            reason: What happened.
            fix: What to repair; its distribution, where nothing better is known.
        """

        def mark(content: _Content) -> _Content:
            if content.failures.get(candidate_id) == (reason, fix):
                return content
            return attrs.evolve(content, failures={**content.failures, candidate_id: (reason, fix)})

        self._change(mark)

    def failure_of(self, candidate_id: str) -> Reason | None:
        """Return what was recorded with `mark_broken` of a candidate, or of a routed pair; None where nothing was."""
        found = self._content.failures.get(candidate_id)
        return None if found is None else found[0]

    def mark_refused(self, candidate_id: str, refusal: ProbeRefusal) -> None:
        """
        Record what a probe has refused. From now on the candidate cannot serve that; one whose probe refuses everything
        is broken.

        Args:
            candidate_id: ``backend/variant``.
            refusal: What the probe refuses, and why.
        """
        if refusal.is_total:
            self.mark_broken(candidate_id, refusal.finding, refusal.fix)
            return

        def mark(content: _Content) -> _Content:
            known = content.refusals.get(candidate_id)
            if known is not None and refusal in known:
                return content
            return attrs.evolve(content, refusals={**content.refusals, candidate_id: refusal.beside(known)})

        self._change(mark)

    def register(self, plugin: Plugin) -> None:
        """
        Add a plugin to this registry; `attnplug.register` adds one to this process's, over every refresh. Adding the
        same one again changes nothing.

        One that was registered by hand replaces what its module has offered under its name or from its manifest's file:
        an edited manifest counts, and what has failed is tried again.

        Raises:
            DuplicateBackendError: Another one of that name is there; nothing changes.
        """
        self._change(lambda content: self._with(content, plugin))

    def _with(self, content: _Content, plugin: Plugin) -> _Content:
        if plugin in content.given:
            return content
        former = [given for given in content.given if replaces(given, plugin)]
        others = [given for given in content.given if given not in former]
        rivals = usable_of((given for given in others if given.name == plugin.name), self._settings)
        if rivals:
            raise clash(plugin, rivals[0])
        names = {plugin.name, *(given.name for given in former)}
        return _Content(
            (*others, plugin),
            self._named((*others, plugin)),
            {id_: why for id_, why in content.failures.items() if id_.partition("/")[0] not in names},
            {id_: each for id_, each in content.refusals.items() if id_.partition("/")[0] not in names},
        )

    def _named(self, given: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
        """Return plugins under the names and aliases that they may have."""
        names = {plugin.name for plugin in given} | {known.name for known in self._known.plugins}
        own = under_built_in_names(given, self._settings)
        return tuple(p if p.built_in else drop_foreign_aliases(p, names) for p in own)

    @property
    def _content(self) -> _Content:
        content = self._last_seen
        while content.after:
            content = content.after[None]
        self._last_seen = content
        return content

    def _change(self, make: Callable[[_Content], _Content]) -> None:
        """Replace the content with what is made of it; again, if a signal handler has replaced it meanwhile."""
        with _lock:
            while True:
                content = self._content
                made = make(content)
                if made is content or content.after.setdefault(None, made) is made:
                    return

    def _listed(self, settings: Settings, *, assume_installed: bool) -> Candidates:
        """Return the candidates under settings; remembered, since every request is negotiated with them."""
        sources = settings.sources.get("allow"), settings.sources.get("block")  # reasons of the candidates name them
        key = settings.allow, settings.block, settings.strict, sources, assume_installed
        content = self._content
        listed = content.lists.get(key)
        if listed is None:
            with _lock:
                listed = content.lists.get(key) or content.lists.setdefault(
                    key, self._list_anew(content, settings, assume_installed=assume_installed)
                )
        return listed

    def _list_anew(self, content: _Content, settings: Settings, *, assume_installed: bool) -> Candidates:
        self._warn_of_unknown_names(settings)
        self._warn_of_missing_folders(settings)
        if self._version_of is None:
            self._version_of = scan().version_of
        found = list_candidates(
            content.plugins, self._known.plugins, settings, self._version_of, assume_installed=assume_installed
        )
        if not content.failures and not content.refusals:
            return found
        return attrs.evolve(found, candidates=tuple(_with_record(content, each) for each in found.candidates))

    def _warn_of_unknown_names(self, settings: Settings) -> None:
        for name, source in unknown_names(settings, self._identities()):
            if (name, source) not in self._warned:
                self._warned.add((name, source))
                names = [known for each in self._identities() for known in each.names()]
                _log.warning(
                    "%r in %s means no backend, variant or distribution that is installed or known%s",
                    name,
                    source,
                    near(name, names),
                )

    def _warn_of_missing_folders(self, settings: Settings) -> None:
        source = settings.sources.get("evidence", "the settings")
        for folder in settings.evidence:
            if (folder, source) not in self._warned and not os.path.isdir(folder):  # noqa: PTH112 - pathlib costs more
                self._warned.add((folder, source))
                _log.warning("%r in %s is no folder, and holds no evidence", folder, source)

    def _identities(self) -> tuple[Identity, ...]:
        """Return what settings and calls may name."""
        plugins = self.plugins
        installed = {plugin.name for plugin in plugins}
        return (
            *map(identity, plugins),
            *(identity(known) for known in self._known.plugins if known.name not in installed),
        )

    def _conflicts(self) -> Mapping[str, NameConflict]:
        """Return the aliases that several backends claim."""
        return self._listed(self._settings, assume_installed=False).aliases

    def _unknown(self, name: str) -> UnknownBackendError:
        names = [known for each in self._identities() for known in (each.name, *each.aliases)]
        return unknown_backend(name, names, {plugin.name for plugin in self.plugins}, self._known.plugins)


def _with_record(content: _Content, candidate: Candidate) -> Candidate:
    """Return a candidate with what has failed of it in this process, and what its probe has refused."""
    refusals, failure = content.refusals.get(candidate.id), content.failures.get(candidate.id)
    if refusals is not None:
        candidate = attrs.evolve(candidate, refusals=refusals)
    if failure is None or candidate.availability in ("refused", "absent"):
        return candidate  # the settings, or its absence, are reason enough
    reason, fix = failure
    offers = (p.part for p in content.plugins if (p.name, p.label) == (candidate.backend, candidate.distribution))
    return attrs.evolve(
        candidate,
        availability="broken",
        reasons=(reason, *candidate.reasons),
        fix=f"{fix or f'repair {next(offers, candidate.distribution)}'}, then attnplug.refresh()",
    )


def _newer(manifest: Manifest) -> str:
    theirs, ours = (".".join(map(str, api)) for api in (manifest.api, CONTRACT_API))
    return f"{manifest.name!r} is written for contract {theirs}; this core implements {ours} and ignores what is newer"


def _unlock_in_child() -> None:
    """Make a new lock in a forked child: the copied one may be held by a thread that the child does not have."""
    global _lock  # noqa: PLW0603 - the lock is one for all registries because of this
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)
