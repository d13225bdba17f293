"""Whether a class that a plugin returned is a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug.contract.backend import Backend


def check_backend_class(cls: object, plugin_id: str) -> type[Backend]:
    """
    Return `cls`, which a plugin's `attnplug_backend` hook returned, if it is a backend class.

    Args:
        cls: What the hook returned.
        plugin_id: ``"backend/variant"``, for the message.

    Raises:
        PluginContractError: With every finding.
    """
    raise NotImplementedError
