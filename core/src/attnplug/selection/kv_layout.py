"""
The layout of paged caches as a setting: asked of every candidate where the requirements leave it open.

What a setting asks is used or refused with a reason, like what the requirements ask; its origin stands beside it. A
layout in the requirements comes before the setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from attnplug.negotiation.evaluation import Question
from attnplug.selection import process
from attnplug.selection.scope import current_scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attnplug.negotiation.verdict import Fix, Reason
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements
    from attnplug.request.settings import Settings

FIELD: Final = "kv_layout"
DEFAULT: Final = "NHD"


def kv_cache_layout() -> str:
    """
    Return the layout that paged caches are asked for in this scope: ``"NHD"`` or ``"HND"``.

    It is that of the innermost `using`, else that of ATTNPLUG_KV_LAYOUT, else that of the configuration file, which are
    read once a process, else NHD. Where nothing is set, a backend may prefer the other one: the layout of a cache that
    is made is its ``agreement.kv_layout``.

    Raises:
        SettingsError: A setting is wrong.
    """
    scope = current_scope()
    if scope is not None and scope.kv_layout is not None:
        return scope.kv_layout
    return process.current().settings.kv_layout or DEFAULT


def pose(requirements: Requirements, device: Device, settings: Settings) -> Question:
    """Return the question that requirements ask under these settings."""
    layout = settings.kv_layout
    if layout is None or requirements.kv_layout is not None or not requirements.paged:
        return Question(requirements, device)
    origin = settings.sources.get(FIELD, "the settings")
    return Question(requirements.evolve(kv_layout=layout), device, origins={FIELD: origin})


def provenance(question: Question, settings: Settings) -> Mapping[str, str]:
    """Return where the settings come from that took part in the answer to a question."""
    if FIELD not in settings.sources or FIELD in question.origins:
        return settings.sources
    return {name: source for name, source in settings.sources.items() if name != FIELD}


def name_origin(reasons: Iterable[Reason], question: Question) -> tuple[Reason, ...]:
    """Return reasons, those against what a setting asks with its origin."""
    origin = question.origins.get(FIELD)
    if origin is None:
        return tuple(reasons)
    return tuple(
        evolve(reason, because="; ".join(filter(None, (reason.because, f"{FIELD} is set by {origin}"))))
        if FIELD in reason.field.split(" and ")
        else reason
        for reason in reasons
    )


def name_way_out(fix: Fix, question: Question) -> Fix:
    """Return a fix, one that asks for another layout than a setting does with where to change it."""
    origin = question.origins.get(FIELD)
    if origin is None or FIELD not in fix.engine:
        return fix
    asked = question.requirements.kv_layout
    action = f"{FIELD}={asked!r} is set by {origin}: change that, or override it"
    return evolve(fix, action="; ".join(filter(None, (fix.action, action))))
