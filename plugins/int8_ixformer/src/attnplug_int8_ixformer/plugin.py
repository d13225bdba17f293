"""
The entry point: imported to probe a variant, or once this backend is chosen.

It imports neither torch, Triton nor ixformer: the backend modules load them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from attnplug import NoBackendError
from attnplug.contract import hookimpl
from attnplug.errors import UnknownBackendError
from attnplug.negotiation import Reason, missing_cuda
from attnplug_int8_ixformer.inner import choose

if TYPE_CHECKING:
    from attnplug import Agreement, Device
    from attnplug.contract import Backend

IXFORMER_MODULES: Final = ("ixformer.inference.functions", "ixformer.contrib.vllm_flash_attn")
"""The modules of ixformer with the functions that the provider calls."""


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class: the quantizing one, or the observer of level 0."""
    del agreement
    if variant == "calibration":
        from attnplug_int8_ixformer.observer import ObserverBackend  # noqa: PLC0415 - torch loads with the choice

        return ObserverBackend
    from attnplug_int8_ixformer.backend import Int8Backend  # noqa: PLC0415 - likewise

    return Int8Backend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return why a variant cannot run on this machine, with a fix, or None."""
    if variant == "calibration":
        return _probe_inner(agreement, device)
    if variant == "ixformer":
        return _probe_modules()
    # The manifest refuses other devices; a test's manifest may add one for the interpreter.
    return missing_cuda() if device.type == "cuda" else None


def _probe_inner(agreement: Agreement, device: Device) -> Reason | None:
    try:
        choose(agreement, device)
    except (NoBackendError, UnknownBackendError) as error:
        return Reason("probe", "inner", None, "no backend computes the attention to observe", str(error))
    return None


def _probe_modules() -> Reason | None:
    for name in IXFORMER_MODULES:
        try:
            found = find_spec(name)
        except ImportError:
            found = None
        if found is None:
            return Reason("broken", "ixformer", None, f"{name} is missing", "install ixformer from its vendor")
    return None
