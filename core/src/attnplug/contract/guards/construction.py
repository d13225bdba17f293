"""Whether what a plugin's classes construct is whole."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from attnplug.contract.builder import MetadataBuilder


def check_constructed(made: object, base: type, last: str) -> None:
    """
    Check that the constructor of the contract ran, whatever a plugin's own one does besides.

    Args:
        made: What was constructed.
        base: The class of the contract.
        last: An attribute that the constructor of `base` sets.

    Raises:
        PluginContractError: It did not run.
    """
    if not hasattr(made, last):
        name, given = type(made).__name__, ", ".join([*inspect.signature(base).parameters])
        raise PluginContractError(
            f"{name} was constructed, and holds nothing of what {base.__name__} keeps",
            f"whoever overrides {base.__name__}.__init__ calls it",
            f"call super().__init__({given}) first in {name}.__init__",
        )


def check_takes_slots(builder: MetadataBuilder) -> None:
    """
    Check that a builder takes slots where graphs were negotiated.

    Raises:
        PluginContractError: It takes none.
    """
    agreement, name = builder.agreement, type(builder).__name__
    level = agreement.requirements.cudagraph
    if level != "never" and not builder.takes_slots:
        raise PluginContractError(
            f"cudagraph={level!r} was negotiated with {agreement.id}, and {name} takes no slots",
            "a manifest declares cudagraph for what its builder builds into graph slots",
            f"set {name}.takes_slots = True, and keep what a replay reads in the slot; or declare no cudagraph",
        )
