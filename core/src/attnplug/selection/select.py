"""Ask: which backend serves these requirements here, and why not the others."""

from __future__ import annotations

import logging
import reprlib
from typing import TYPE_CHECKING

from attnplug.errors import NoBackendError, RequirementsError
from attnplug.request.requirements import Requirements
from attnplug.selection import state as process
from attnplug.selection.decide import decide
from attnplug.selection.scope import BackendNames, Overrides, current_scope, overrides

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attnplug.request.device import Device
    from attnplug.request.settings import Options, Settings
    from attnplug.selection.explanation import Explanation
    from attnplug.selection.selection import Selection

_log = logging.getLogger("attnplug")


def select(
    requirements: Requirements,
    device: Device | str | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Selection:
    """
    Choose a backend. Pure: no plugin, no kernel library and no torch is imported. Decisions are remembered.

    Args:
        requirements: What is asked.
        device: Where it shall run; this process's device by default.
        backend: A name: that one, or an error. A list: in that order; ``"auto"`` among them permits any other.
        options: Options by backend.

    Raises:
        NoBackendError: Nothing can serve; it carries every verdict.
        UnknownBackendError: A name is neither installed nor known.
        SettingsError: An option or a setting is wrong.
    """
    state = process._state  # noqa: SLF001 - the repeated question has a budget of 0.3 us; a call to `current` is a third of it
    if state is not None and device is None and backend is None and options is None and current_scope() is None:
        found = state.hot.get(requirements) if type(requirements) is Requirements else None
        if found is not None and state.registry.generation == state.generation:
            return found
    return _select(requirements, overrides("the call", backend, options, device))


def explain(
    requirements: Requirements,
    device: Device | str | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
    assume_installed: bool = False,
) -> Explanation:
    """
    Say what would be chosen and why not the others.

    Args:
        requirements: As for `select`.
        device: As for `select`.
        backend: As for `select`.
        options: As for `select`.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there.

    It never raises because nothing can serve: then `Explanation.chosen` is None.

    Raises:
        UnknownBackendError: A name is neither installed nor known.
        SettingsError: An option or a setting is wrong.
    """
    asked = overrides("the call", backend, options, device).over(current_scope())
    state = process.current()
    return _explain(
        state,
        requirements,
        asked.device or state.device,
        asked.over_settings(state.settings),
        assume_installed=assume_installed,
    )


def context(asked: Overrides) -> tuple[process.State, Device, Settings]:
    """Return the state, the device and the settings that a call with these keywords is decided on."""
    state = process.current()
    merged = asked.over(current_scope())
    return state, merged.device or state.device, merged.over_settings(state.settings)


def no_backend(explanation: Explanation, settings: Settings, layer: str = "") -> NoBackendError:
    """Return the error that says why nothing can serve."""
    whose = f" of layer {layer!r}" if layer else ""
    named = (
        f" among {', '.join(map(repr, settings.backend))} ({settings.sources.get('backend', 'the settings')})"
        if settings.backend
        else ""
    )
    offered = [v for v in explanation.verdicts if v.remedy is not None and v.remedy.possible]
    permitted = [v for v in offered if {v.id, v.id.partition("/")[0]} & set(settings.backend)]
    here = [v for v in offered if v.status != "absent"] or [v for v in offered if v.remedy and v.remedy.install]
    ways = [f"{verdict.id}: {verdict.remedy}" for verdict in permitted or here]
    ways += (
        ["permit others with 'auto' in the list"]
        if settings.backend and any(v.status == "eligible" for v in explanation.verdicts)
        else []
    )
    return NoBackendError(
        f"no backend can serve the requirements{whose}{named}",
        f"every candidate was asked\n{explanation}",
        "one of these\n    " + "\n    ".join(ways)
        if ways
        else "change the model's attention: no candidate serves these model fields",
        explanation,
    )


def _select(requirements: Requirements, asked: Overrides) -> Selection:
    state, device, settings = context(asked)
    explanation = _explain(state, requirements, device, settings)
    if explanation.chosen is None:
        raise no_backend(explanation, settings)
    if settings is state.settings and state.is_own(device):
        state.hot[requirements] = explanation.chosen
    return explanation.chosen


def _explain(
    state: process.State,
    requirements: Requirements,
    device: Device,
    settings: Settings,
    *,
    assume_installed: bool = False,
) -> Explanation:
    if not isinstance(requirements, Requirements):
        raise _no_question(requirements)
    key = (requirements, device, settings, _frozen(settings), assume_installed)
    found = state.decisions.get(key)
    if found is None:
        found = decide(state.registry, requirements, device, settings, assume_installed=assume_installed)
        if state.remember(key, found) and not assume_installed:
            log_decision(found)
        found = state.decisions.get(key, found)
    return found


def _no_question(given: object) -> RequirementsError:
    from attnplug.selection.selection import Selection  # noqa: PLC0415 - only mistakes come by here

    allowed = "the question is an attnplug.Requirements"
    if isinstance(given, Selection):
        return RequirementsError(
            f"the decision for {given.id!r} was given as a question",
            allowed,
            "load it with selection.load(), or ask selection.requirements again",
        )
    return RequirementsError(
        f"requirements={reprlib.repr(given)} was given", allowed, "build one, or read one with Requirements.from_dict"
    )


def log_decision(explanation: Explanation) -> None:
    """Write the one record of a new decision. It carries the Selection as ``record.selection``."""
    chosen = explanation.chosen
    if chosen is None:
        _log.info("No backend can serve %s on %s", explanation.requirements, explanation.device)
    else:
        if not _log.isEnabledFor(logging.INFO):
            return  # what is unverified takes files to read
        unverified = ", ".join(f"{item.field}={item.value}" for item in chosen.unverified)
        _log.info(
            "Selected %s for %s on %s%s",
            chosen.id,
            explanation.requirements,
            explanation.device,
            f"; unverified there: {unverified}" if unverified else "",
            extra={"selection": chosen},
        )


def _frozen(settings: Settings) -> Hashable:
    """Return the options, and where everything comes from, since a decision tells that too."""
    options = settings.options
    values = (
        (backend, name, repr(value)) for backend in sorted(options) for name, value in sorted(options[backend].items())
    )
    return (*values, *settings.sources.items())
