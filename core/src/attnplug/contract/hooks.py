"""
The two hooks of a plugin, and the markers for them. pluggy is imported here and nowhere else in the contract.

    from attnplug.contract.hooks import hookimpl

    @hookimpl
    def attnplug_backend(variant, agreement):
        from my_plugin.backend import MyBackend
        return MyBackend

A plugin module stays importable without its kernel library: import that inside the hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from attnplug.contract.vendor import Backend
    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.reason import Reason
    from attnplug.request.device import Device

PROJECT: Final = "attnplug"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:  # type: ignore[empty-body]
    """
    Return the backend class of a variant. Required of every plugin.

    Args:
        variant: The variant that was chosen.
        agreement: What was negotiated.
    """


@hookspec(firstresult=True)
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """
    Say why this machine cannot run the variant after all, or None. Optional; called before the backend class is used.

    This is for what only the loaded library knows: built without a feature, no compiler, another ABI. What a manifest
    can say belongs there.

    The code of the reason says what it refuses. ``"probe"`` refuses this request on this device: the library is there,
    and lacks what the request needs; other requests still find the variant. ``"probe_device"`` refuses every request on
    this device. ``"broken"`` refuses everything: no library, no compiler, a torch without CUDA; so does an exception.
    All of it is remembered until `attnplug.refresh`: for what was refused, the probe is not called again.

    A probe takes those of the three arguments that it needs.

    Args:
        variant: The variant that was chosen.
        agreement: What was negotiated.
        device: The device that was selected for.

    Returns:
        None, or a Reason of one of these codes: its `supported` says what was found, its `because` is the fix.
    """
