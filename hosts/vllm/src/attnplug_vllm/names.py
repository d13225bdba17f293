"""How vLLM calls what attnplug offers: names of members of its enum of attention backends."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

AUTO: Final = "ATTNPLUG"
"""The name that leaves the choice to attnplug."""

SLOT: Final = "CUSTOM"
"""The one slot for a foreign backend, where vLLM takes no names as strings."""

CPU: Final = "CPU_ATTN"
"""The backend that vLLM's CPU platform returns, whatever was chosen."""

MLA_ON_CPU: Final = ("CPU_MLA", "AMX_MLA")
"""Those that it returns for multi-head latent attention. vLLM 0.26 has neither, and refuses such models on a CPU."""

CLASSES: Final = "attnplug_vllm.backend"
"""The module that vLLM gets the classes from."""

PREFILL: Final = "attnplug_vllm.prefill.LatentPrefill"
"""The class behind the slot of vLLM's registry of prefills with latent attention, which is called `SLOT`, too."""


def members() -> Any:
    """Return vLLM's enum."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415 - imports torch

    return AttentionBackendEnum


def takes_names() -> bool:
    """Whether this version of vLLM takes the names of foreign backends as strings."""
    return hasattr(members(), "register")


class _Names(dict[str, Any]):
    """The members of vLLM's enum, by name. A name of ours that is not among them is an error with the reason."""

    error_of: Callable[[str], Exception]

    def __missing__(self, name: str) -> Any:
        if isinstance(name, str) and is_own_name(name):
            raise self.error_of(name)
        raise KeyError(name)


def explain_missing(enum: Any, error_of: Callable[[str], Exception]) -> None:
    """Let the lookup of a name of ours that vLLM's enum lacks raise this error, which is an AttributeError too."""
    # Neither vLLM nor Python's enums have a public hook for names that are not members: the table of members is
    # Python's own. Where an enum has another, or does not let it be replaced, vLLM's own error remains.
    table = getattr(enum, "_member_map_", None)
    if isinstance(table, dict) and not isinstance(table, _Names):
        table = _Names(table)
        with contextlib.suppress(AttributeError, TypeError):
            enum._member_map_ = table
    if isinstance(table, _Names):
        table.error_of = error_of


def own_name(choice: tuple[str, ...]) -> str:
    """Return the enum's name of a choice: the identifier of a candidate, or nothing where attnplug decides."""
    if not takes_names():
        return SLOT
    return name_of(choice[0]) if choice else AUTO


def name_of(candidate_id: str) -> str:
    """Return the name of a candidate, ``ATTNPLUG_FLASH_ATTN_FA3`` for ``flash_attn/fa3``."""
    return f"{AUTO}_{candidate_id.replace('/', '_').upper()}"


def is_own_name(name: str) -> bool:
    """Whether a name is one of ours, registered or not."""
    return name == AUTO or name.startswith(f"{AUTO}_")


def is_own(member: Any) -> bool:
    """Whether a member of vLLM's enum, or None, is a name of ours, or the slot with our class in it."""
    if member is None:
        return False
    if member.name == SLOT:
        return bool(member.is_overridden() and member.get_path() == f"{CLASSES}.{SLOT}")
    return is_own_name(member.name)
