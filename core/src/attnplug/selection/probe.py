"""
A plugin's probe: asked after the import what no metadata can tell, and believed as far as it goes.

A reason of the code ``broken`` holds for everything, as does what it raises; any other for the agreement and the device
that the probe takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.discovery.refusal import Refusal
from attnplug.errors import PluginContractError, PluginLoadError
from attnplug.negotiation.reason import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.selection.selection import Selection


def probe(manager: Any, selection: Selection) -> Refusal | None:
    """
    Ask the plugin whether it can carry out a decision; None where it can, or has no probe.

    Args:
        manager: The plugin's own manager of hooks.
        selection: The decision.

    Raises:
        PluginLoadError: The probe raised something.
        PluginContractError: It returned neither a reason nor None.
    """
    asked = {"variant": selection.variant, "agreement": selection.agreement, "device": selection.device}
    hook = manager.hook.attnplug_probe
    try:
        refused = hook(**asked)
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{selection.id!r} was probed",
            f"its probe raised {type(error).__name__}: {error}",
            "repair the plugin, or block it",
        ) from error
    if refused is None:
        return None
    if not isinstance(refused, Reason):
        raise PluginContractError(
            f"{selection.id!r} was probed", f"its probe returned {refused!r}", "return None, or an attnplug Reason"
        )
    taken = {name for implementation in hook.get_hookimpls() for name in implementation.argnames}
    return _about(refused, {name: value for name, value in asked.items() if name in taken})


def _about(reason: Reason, taken: Mapping[str, Any]) -> Refusal:
    """Return a refusal of what its probe spoke of. What a probe does not take, its answer does not depend on."""
    return Refusal(reason) if reason.code == "broken" else Refusal(reason, taken.get("agreement"), taken.get("device"))


def refused(selection: Selection, refusal: Refusal) -> PluginLoadError:
    """Return the error for a decision that the plugin's probe refuses."""
    asked = selection.requirements.to_dict() if refusal.agreement is not None else {}
    given = " ".join(f"{name}={value}" for name, value in asked.items())
    where = f" on {selection.device}" if refusal.device is not None else ""
    return PluginLoadError(
        f"{selection.id!r} was probed{where}{f' for {given}' if given else ''}",
        f"it refuses {'this machine' if refusal.agreement is None else 'this request'}: {refusal.told}",
        refusal.remedy,
    )
