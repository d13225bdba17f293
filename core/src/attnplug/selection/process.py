"""
What this process knows: installed backends, settings, the device, and the decisions that were made on them.

One immutable-looking snapshot is replaced as a whole, so that threads see either the old world or the new one.
Nothing here survives `refresh` but the backends that were registered by hand: nothing else could bring them back.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from attrs import define, field

from attnplug.discovery.plugin import BY_HAND, Plugin
from attnplug.discovery.registry import Registry
from attnplug.errors import ManifestError
from attnplug.manifest.reader import read_manifest
from attnplug.request.device import Device, is_unseen
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import ModuleType

    from attnplug.request.requirements import Requirements
    from attnplug.selection.explanation import Explanation
    from attnplug.selection.selection import Selection


_MOST_DECISIONS = 4096


@define(eq=False)
class State:
    """
    One snapshot.

    Attributes:
        registry: The installed backends.
        settings: The environment and the configuration file.
        generation: The registry's generation when `hot` and `decisions` were begun.
        hot: Decisions on the default device without any keyword: the path of every repeated question.
        decisions: All decisions, by question, device and settings.
    """

    registry: Registry
    settings: Settings
    generation: int
    hot: dict[Requirements, Selection] = field(factory=dict)
    decisions: dict[Hashable, Explanation] = field(factory=dict)
    _device: Device | None = None

    @property
    def device(self) -> Device:
        """
        The device of this process, looked for when first needed. A CPU that was named only because nothing could see
        the GPU is not kept: torch may be imported later, and see it.
        """
        if self._device is not None:
            return self._device
        found = Device.current()
        if found.type != "cpu" or not is_unseen():
            self._device = found
        return found

    def is_own(self, device: Device) -> bool:
        """Whether a device is the one of this process. It is not looked for to answer: that takes NVML 10 to 30 ms."""
        return device is self._device

    def remember(self, key: Hashable, explanation: Explanation) -> bool:
        """Keep a decision; return whether it is a new one. The oldest goes when there are too many."""
        if len(self.decisions) >= _MOST_DECISIONS:
            self.decisions.pop(next(iter(self.decisions)), None)
            self.hot.clear()
        return self.decisions.setdefault(key, explanation) is explanation


_lock = RLock()
_state: State | None = None
_by_hand: tuple[Plugin, ...] = ()  # between a refresh and the next use


def current() -> State:
    """
    Return the snapshot, scanning what is installed on first use and starting a new one after the registry has
    changed.
    """
    state = _state
    if state is None or state.registry.generation != state.generation:
        return _renew()
    return state


def refresh() -> None:
    """
    Read everything again on next use: installed backends, settings and the device. All decisions are forgotten, and
    what has failed is tried again. Backends that were registered by hand stay.
    """
    from attnplug.selection.options import read_profile  # noqa: PLC0415 - only a refresh needs it

    global _by_hand, _state  # noqa: PLW0603 - the process-wide names of this project; see the module docstring
    with _lock:
        if _state is not None:
            _by_hand = _state.registry.by_hand
        _state = None
        read_profile.cache_clear()


def current_device() -> Device:
    """
    Return the device that a selection is for unless another is named: this process's own.

    Passing it to `select` costs what passing none does.
    """
    return current().device


def registry() -> Registry:
    """Return the registry of this process."""
    return current().registry


def _renew() -> State:
    global _by_hand, _state  # noqa: PLW0603 - the process-wide names of this project; see the module docstring
    with _lock:
        if _state is None:
            settings = Settings.read()
            found = Registry.scan(settings, _by_hand)
            _by_hand = ()
            _state = State(found, settings, found.generation)
        elif _state.registry.generation != _state.generation:
            _state = State(_state.registry, _state.settings, _state.registry.generation, device=_state._device)  # noqa: SLF001
        return _state


def _unlock_in_child() -> None:
    """A fork may copy a lock that another thread holds; nobody would ever release it in the child."""
    global _lock  # noqa: PLW0603 - as above
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def register(module: ModuleType | str, *, manifest: Path | str) -> str:
    """
    Offer a backend to this process, as if its distribution were installed.

    Registering the same thing again changes nothing, so that it may run in every worker. An edited manifest of the
    same module takes the place of the former one. It stays over `refresh`, and ends with the process.

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
    registry().register(Plugin(name=parsed.name, module=name, distribution=BY_HAND, version="", manifest=parsed))
    return parsed.name


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ManifestError(
            f"manifest={str(path)!r} was given",
            f"there is no such file, seen from {str(Path.cwd())!r}"
            if not path.is_absolute()
            else "there is no such file",
            "name the attnplug.toml that describes the module; for one beside it: Path(module.__file__).with_name(...)",
        )
    return path
