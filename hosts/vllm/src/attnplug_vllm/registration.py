"""
The names under which vLLM knows the backends of attnplug.

A name is a member of vLLM's enum of attention backends. From vLLM 0.32 on each candidate has one: ``flash_attn/fa3`` is
``ATTNPLUG_FLASH_ATTN_FA3``. vLLM 0.26 has one slot for a foreign backend, ``CUSTOM``. It leaves the choice to attnplug,
whose setting ``ATTNPLUG_BACKEND`` can name a backend.

A candidate that cannot run here has no name, so that vLLM does not offer it. Naming it is an error with the reason.
"""

from __future__ import annotations

import copyreg
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import attnplug
from attnplug.errors import AttnplugError, UnknownBackendError
from attnplug_vllm import facts
from attnplug_vllm.names import (
    AUTO,
    CLASSES,
    CPU,
    MLA_ON_CPU,
    PREFILL,
    SLOT,
    explain_missing,
    is_own_name,
    members,
    name_of,
    own_name,
    takes_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnplug.negotiation import Candidate, Reason

__all__ = [
    "AUTO",
    "CLASSES",
    "CPU",
    "SLOT",
    "UnknownNameError",
    "choice_of",
    "choices",
    "own_name",
    "refusal",
    "register",
    "restore",
    "takes_names",
]

_log: Final = logging.getLogger("vllm.attnplug")  # vLLM shows the records of loggers below its own

_PLATFORMS: Final = frozenset({"", "cpu", "cuda"})
"""vLLM's device types whose selectors take a foreign backend; ROCm's is cuda, and without a device it is empty."""

_INSTALLATION: Final = frozenset({"absent", "missing", "version"})
"""Codes of reasons that an installation mends; where the device is of another kind, it mends nothing."""


def register() -> None:
    """
    Add the names to vLLM's enum, or fill its slot. Calling it again adds what is new.

    Where attnplug's settings are wrong, or a plugin has a problem under the strict setting, it has no other name than
    ``ATTNPLUG``, whose choice is an error with the reason.
    """
    from vllm.v1.attention.backends.registry import register_backend  # noqa: PLC0415 - imports torch

    enum = members()
    copyreg.pickle(enum, _reduce)
    for name in (CPU, *MLA_ON_CPU):
        if name in enum.__members__:
            _claim(enum[name], f"{CLASSES}.{name}", register_backend)
    if takes_names():
        for name in choices():
            _add(enum, name)
    else:
        _claim(enum[SLOT], f"{CLASSES}.{SLOT}", register_backend)
    _claim_prefills()
    explain_missing(enum, _error_of)
    _warn_of_platform(facts.platform_name())


def choices() -> dict[str, tuple[str, ...]]:
    """Return the choice behind each name: the candidates that can run here, and first the name that names none."""
    found: dict[str, tuple[str, ...]] = {AUTO: ()}
    try:
        candidates = attnplug.registry().candidates()
    except AttnplugError as error:  # vLLM may run on its own backends; the choice of one of these raises it again
        _log.error("The attention backends of attnplug have no names in vLLM. %s", error)
        return found
    contested = _contested(candidates)
    for candidate in candidates:
        if not _obstacles(candidate) and name_of(candidate.id) not in contested:
            found[name_of(candidate.id)] = (candidate.id,)
    return found


def choice_of(name: str) -> tuple[str, ...]:
    """
    Return the choice behind a name.

    Raises:
        UnknownBackendError: No candidate has this name; the error says why.
    """
    if name in (AUTO, SLOT):
        return ()
    choice = choices().get(name)
    if choice is None:
        raise refusal(name)
    return choice


def refusal(name: str) -> UnknownBackendError:
    """Return the error that says why a name of ours has no backend."""
    problem = f"the attention backend {name!r} was requested of vLLM"
    if not takes_names():
        return UnknownBackendError(
            problem,
            f"this version of vLLM has the slot {SLOT} for foreign backends, and takes no other names",
            f"pass --attention-backend {SLOT}, and name a backend of attnplug in ATTNPLUG_BACKEND if one is meant",
        )
    candidates = attnplug.registry().candidates()
    called = [c for c in candidates if name_of(c.id) == name] or [
        c for c in candidates if "/" not in c.id and name.startswith(f"{name_of(c.id)}_")
    ]
    if len(called) > 1:
        listed = " and ".join(repr(candidate.id) for candidate in called)
        return UnknownBackendError(
            problem,
            f"{listed} have this name, and neither is chosen silently",
            f"pass --attention-backend {AUTO}, and set ATTNPLUG_BACKEND={called[0].id}",
        )
    for candidate in called:
        why = "; ".join(map(str, _obstacles(candidate)))
        return UnknownBackendError(problem, f"{candidate.id!r} cannot run here: {why}", _fix(candidate))
    return UnknownBackendError(
        problem, f"the names of attnplug's backends are {', '.join(choices())}", f"name one of these, or {AUTO}"
    )


def restore(name: str) -> Any:
    """Return a member of vLLM's enum in a process that may not have registered it yet, for pickle."""
    register()
    return members()[name]


class UnknownNameError(UnknownBackendError, AttributeError):
    """A name of ours that has no member. An enum finds its attributes among its members, and `hasattr` expects this."""


def _error_of(name: str) -> UnknownNameError:
    error = refusal(name)
    return UnknownNameError(error.problem, error.expected, error.fix)


@cache
def _warn_of_platform(name: str) -> None:
    """Warn, once in a process, of a platform of vLLM that runs no backend of attnplug, whatever is registered."""
    if name not in _PLATFORMS:
        _log.warning(
            "The attention backends of attnplug have no effect here: vLLM's CUDA, ROCm and CPU platforms run them, and "
            "the platform %r refuses or ignores their names. Leave --attention-backend out",
            name,
        )


def _add(enum: Any, name: str) -> None:
    path = f"{CLASSES}.{name}"
    there = enum.__members__.get(name)
    if there is None:
        enum.register(name, path)
    elif there.get_path() != path:
        _log.warning("vLLM knows %s as %s already; attnplug does not replace it", name, there.get_path())


def _claim_prefills() -> None:
    """Let vLLM get the slot of its registry of prefills with latent attention from here."""
    from vllm.v1.attention.backends.mla.prefill.registry import (  # noqa: PLC0415 - imports torch
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )

    _claim(MLAPrefillBackendEnum[SLOT], PREFILL, register_mla_prefill_backend)


def _claim(member: Any, path: str, register: Callable[[Any, str], Any]) -> None:
    """Let vLLM get one of its own members from here."""
    if member.is_overridden() and member.get_path() != path:
        _log.warning(
            "Another plugin has registered %s for %s. attnplug does not replace it; VLLM_PLUGINS can leave it out",
            member.get_path(),
            member.name,
        )
        return
    register(member, path)


def _reduce(member: Any) -> Any:
    """Pickle a member of ours by its name: the process that reads it may not have registered it yet."""
    if is_own_name(member.name):
        return restore, (member.name,)
    return member.__reduce_ex__(2)


def _contested(candidates: tuple[Candidate, ...]) -> set[str]:
    """Return the names that several candidates would have: ``a_b/c`` and ``a/b_c``, say."""
    found: set[str] = set()
    contested: set[str] = set()
    for candidate in candidates:
        name = name_of(candidate.id)
        (contested if name in found else found).add(name)
    return contested


def _obstacles(candidate: Candidate) -> tuple[Reason, ...]:
    """Return why a candidate can serve no request here: the kind of the device, then its installation."""
    of_device = _of_device(candidate)
    if not of_device:
        return candidate.reasons
    return *of_device, *(reason for reason in candidate.reasons if reason.code not in _INSTALLATION)


def _of_device(candidate: Candidate) -> tuple[Reason, ...]:
    return () if candidate.variant is None else tuple(candidate.objections(facts.device_kind()))


def _fix(candidate: Candidate) -> str:
    if _of_device(candidate):
        return f"name another backend, or {AUTO}"
    steps: Iterator[str] = filter(None, (candidate.fix, _install(candidate)))
    return "; ".join(steps) or f"name another backend, or {AUTO}"


def _install(candidate: Candidate) -> str:
    return f"install {', '.join(candidate.install)}" if candidate.install else ""
