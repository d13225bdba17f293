"""The backend that computes while values are observed, chosen as any host chooses one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attnplug

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Requirements, Selection
    from attnplug.contract import Backend

CALIBRATE: Final = "int8_ixformer.calibrate"
"""The open feature that asks for the observer."""


def requirements_of(agreement: Agreement) -> Requirements:
    """Return what is asked of the inner backend: the same, less the calibration, in the blocks that were agreed on."""
    asked = agreement.requirements
    features = tuple(name for name in asked.features if name != CALIBRATE)
    return asked.evolve(features=features, block_size=agreement.block_size, kv_layout=agreement.kv_layout)


def choose(agreement: Agreement, device: Device) -> Selection:
    """
    Return the choice of the inner backend.

    Raises:
        NoBackendError: None serves.
    """
    return attnplug.select(requirements_of(agreement), device, backend=_named(agreement))


def load(agreement: Agreement, device: Device) -> Backend:
    """
    Return the inner backend.

    Raises:
        NoBackendError: None serves, or stands.
    """
    return attnplug.load(requirements_of(agreement), device, backend=_named(agreement))


def _named(agreement: Agreement) -> str:
    return str(agreement.options["inner"])
