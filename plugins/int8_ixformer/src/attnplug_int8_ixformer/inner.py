"""The inner backend of level 0, which computes while values are observed: selected through the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attnplug

if TYPE_CHECKING:
    from attnplug import Agreement, Device, Requirements, Selection
    from attnplug.contract import LoadedBackend

CALIBRATE: Final = "int8_ixformer.calibrate"
"""The open feature that requests the observer."""


def requirements_of(agreement: Agreement) -> Requirements:
    """Return the requirements without the calibration, with the agreed block size, layout and form."""
    requested = agreement.requirements
    features = tuple(name for name in requested.features if name != CALIBRATE)
    names = ("block_size", "kv_layout", "kv_cache_form")
    return requested.evolve(features=features, **{name: getattr(agreement, name) for name in names})


def choose(agreement: Agreement, device: Device) -> Selection:
    """
    Select the inner backend.

    Raises:
        NoBackendError: No backend supports the requirements.
    """
    return attnplug.select(requirements_of(agreement), device, backend=_name_of(agreement))


def load(agreement: Agreement, device: Device) -> LoadedBackend:
    """
    Select and load the inner backend.

    Raises:
        NoBackendError: No backend supports the requirements, or loads.
    """
    return attnplug.load(requirements_of(agreement), device, backend=_name_of(agreement))


def _name_of(agreement: Agreement) -> str:
    return str(agreement.options["inner"])
