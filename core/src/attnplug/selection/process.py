"""
The state of this process: installed backends, settings, the device, and the decisions that were made on them.

A state is replaced as a whole, so that threads see either the old one or the new one. Nothing of it survives `refresh`
but the backends that were registered by hand: nothing else could restore them. Registrations, refreshes and the making
of states by other threads exclude each other; a selection excludes nothing, and sees what was registered before it
began. A signal handler excludes nothing either, since it runs in the middle of these, on the same thread: of two states
that follow one another's, the first one counts for both.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, cast

from attrs import define, field, frozen

from attnplug.discovery.plugin import BY_HAND, Plugin
from attnplug.discovery.registry import Registry
from attnplug.errors import ManifestError
from attnplug.manifest.reader import read_manifest
from attnplug.request.device import Device, is_unseen
from attnplug.request.settings import Settings
from attnplug.selection.options import Profile

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import ModuleType

    from attnplug.evidence.store import EvidenceStore
    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.reason import Unverified
    from attnplug.request.requirements import Requirements
    from attnplug.selection.explanation import Explanation
    from attnplug.selection.selection import Selection

_MOST_DECISIONS: Final = 512
"""Decisions that are kept in each of the two tables; a process makes a handful, unless it tries out values."""

_OUT_OF_DATE: Final = -1
"""The generation of no registry."""

_lock = RLock()  # of the tables of decisions; see `Process._unlock` for forked children


@frozen(eq=False, slots=False)
class ShippedEvidence:
    """
    The evidence that plugins ship and the user has, for what evaluations leave unverified. Nothing is read, nor the
    code that reads it imported, before that is looked up.

    Attributes:
        registry: The installed backends.
        folders: The user's folders.
    """

    registry: Registry
    folders: tuple[str, ...]

    @cached_property
    def store(self) -> EvidenceStore:
        """The store, which reads each folder once."""
        from attnplug.evidence.store import EvidenceStore  # noqa: PLC0415 - deciding does without, and has a budget

        return EvidenceStore(self.registry.plugins, self.folders)

    def find_unverified(self, candidate: Candidate, agreement: Agreement, device: Device) -> tuple[Unverified, ...]:
        """Return what of an agreement no evidence covers on a device."""
        return self.store.find_unverified(candidate, agreement, device)


@define(eq=False)
class ProcessState:
    """
    One state.

    Attributes:
        registry: The installed backends.
        settings: The environment and the configuration file.
        generation: The registry's generation when `hot` and `decisions` were begun; none that it has, once the state
            is out of date.
        after: The state that has replaced this one; empty in the newest.
        hot: Decisions without any keyword but a device: the path of every repeated request. The key is the requirements
            for this process's device, and for others (requirements, device), the device as the call has named it.
        decisions: All decisions, by requirements, device and settings.
        own_device: The device of this process, once it is known.
        profile: The measured times that the settings name.
        evidence: What was verified.
    """

    registry: Registry
    settings: Settings
    generation: int
    hot: dict[Requirements | tuple[Requirements, Device | str], Selection] = field(factory=dict)
    decisions: dict[Hashable, Explanation] = field(factory=dict)
    own_device: Device | None = None
    profile: Profile = field()
    after: dict[None, ProcessState] = field(factory=dict)
    evidence: ShippedEvidence = field(init=False)

    @profile.default
    def _profile(self) -> Profile:
        return Profile(self.settings.profile)

    @evidence.default
    def _evidence(self) -> ShippedEvidence:
        return ShippedEvidence(self.registry, self.settings.evidence)

    @property
    def device(self) -> Device:
        """
        The device of this process, looked up when first needed. A CPU that was named only because nothing could see
        the GPU is not kept: torch may be imported later, and see it.
        """
        if self.own_device is not None:
            return self.own_device
        found = Device.current()
        if found.type != "cpu" or not is_unseen():
            self.own_device = found
        return found

    def remember(self, key: Hashable, explanation: Explanation) -> Explanation:
        """Keep a decision. Of threads that decide at once, all get the decision of the first."""
        with _lock:
            kept = self.decisions.setdefault(key, explanation)
            _forget_oldest(self.decisions)
        return kept

    def repeat(self, key: Requirements | tuple[Requirements, Device | str], selection: Selection) -> None:
        """Let the fast path of `select` repeat a decision."""
        with _lock:
            self.hot[key] = selection
            _forget_oldest(self.hot)


def _forget_oldest(table: dict[Any, Any]) -> None:
    if len(table) > _MOST_DECISIONS:
        del table[next(iter(table))]


class _Unread:
    """In place of the registry of a state of which nothing was read yet."""

    generation = 0
    by_hand = ()


def unread() -> ProcessState:
    """Return a state that is out of date, and of which nothing was read."""
    return ProcessState(cast("Registry", _Unread()), Settings(), _OUT_OF_DATE)


class Process:
    """
    The holder of the state. `PROCESS` is the only one.

    Attributes:
        state: The state. It may be out of date: `current` renews it. None is one of which nothing was read.
    """

    def __init__(self) -> None:
        self.state: ProcessState | None = unread()
        self._refreshes = 0
        self._lock = RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._unlock)

    def current(self) -> ProcessState:
        """
        Return the state: what is installed is scanned on first use, and a new state begins after the registry has
        changed.
        """
        state = self.state
        if state is None or state.registry.generation != state.generation:
            return self._renew()
        return state

    def clear(self) -> None:
        """Forget the state, but for the plugins that were registered by hand: the next one takes them from it."""
        with self._lock:
            self._refreshes += 1
            if self.state is not None:
                self.state.generation = _OUT_OF_DATE

    def register(self, plugin: Plugin) -> None:
        """Add a plugin to the registry: to the one that a concurrent refresh takes it over from, or to the next one."""
        with self._lock:
            while plugin not in (registry := self.current().registry).by_hand:
                registry.register(plugin)

    def _renew(self) -> ProcessState:
        with self._lock:
            while True:
                state, refreshes = self.state, self._refreshes
                if state is None:
                    state = unread()
                if state.registry.generation == state.generation:
                    return state
                # Whatever ran in the middle of this, on the same thread: the state that came first is the next one.
                self.state = state.after.get(None) or state.after.setdefault(None, self._next(state))
                if refreshes != self._refreshes:
                    self.state.generation = _OUT_OF_DATE

    def _next(self, state: ProcessState) -> ProcessState:
        if state.generation != _OUT_OF_DATE:  # the registry has changed
            registry, generation = state.registry, state.registry.generation
            return ProcessState(
                registry, state.settings, generation, own_device=state.own_device, profile=state.profile
            )
        settings = Settings.read()
        registry = Registry.scan(settings, state.registry.by_hand)
        return ProcessState(registry, settings, registry.generation)

    def _unlock(self) -> None:
        """Make new locks in a forked child: the copied ones may be held by a thread that the child does not have."""
        global _lock
        self._lock, _lock = RLock(), RLock()


PROCESS: Final = Process()


def current_state() -> ProcessState:
    """Return the state of this process."""
    return PROCESS.current()


def refresh() -> None:
    """
    Read everything again on next use: installed backends, settings and the device. All decisions are forgotten, and
    what has failed is tried again. Backends that were registered by hand stay.
    """
    PROCESS.clear()


def current_device() -> Device:
    """
    Return the device that a selection is for unless another is named: this process's own.

    Passing it to `select` costs what passing none does.
    """
    return current_state().device


def registry() -> Registry:
    """Return the registry of this process."""
    return current_state().registry


def register(module: ModuleType | str, *, manifest: Path | str) -> str:
    """
    Offer a backend to this process, as if its distribution were installed.

    Registering the same thing again changes nothing, so that it may run in every worker. An edited manifest of the
    same module replaces the former one. It stays over `refresh`, and ends with the process.

    Args:
        module: The plugin module, or its dotted name; it is imported only when its backend is loaded.
        manifest: The attnplug.toml.

    Returns:
        The backend's name.

    Raises:
        ManifestError: The manifest is malformed, or there is no such file. Nothing is registered then.
        DuplicateBackendError: Another backend of that name is there. Nothing is registered then.
    """
    name = module if isinstance(module, str) else module.__name__
    parsed = read_manifest(_existing(Path(manifest)))
    PROCESS.register(Plugin(name=parsed.name, module=name, distribution=BY_HAND, version="", manifest=parsed))
    return parsed.name


def _existing(path: Path) -> Path:
    if not path.is_file():
        seen_from = "" if path.is_absolute() else f", seen from {str(Path.cwd())!r}"
        raise ManifestError(
            f"manifest={str(path)!r} was given",
            f"there is no such file{seen_from}",
            "name the attnplug.toml that describes the module; for one beside it: Path(module.__file__).with_name(...)",
        )
    return path
