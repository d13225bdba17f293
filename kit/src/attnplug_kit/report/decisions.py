"""The backends that known models get on several devices: each model as a whole, as `attnplug.plan` decides it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug import NoBackendError, plan
from attnplug.request import Requirements
from attnplug_kit.conformance.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug import Device, Plan

Model = dict[str, Requirements]
"""What each layer of a model requests, by the name of the layer."""

_SLIDING: Final = " sliding"


@frozen
class Decision:
    """
    The decision for a model on a device.

    Attributes:
        model: The model.
        device: The device, as a reader sees it.
        ids: The candidates that are chosen, those of most layers first; empty where no backend serves the model.
        because: What decided, for each candidate that had a rival.
        failure: The request that no backend serves; empty where all are served.
        unverified: What no run of the kit covers, each once.
    """

    model: str
    device: str
    ids: tuple[str, ...]
    because: tuple[str, ...] = ()
    failure: str = ""
    unverified: tuple[str, ...] = ()


def published_models() -> dict[str, Model]:
    """Return the layers of the models that the kit tests, by model."""
    found: dict[str, Model] = {}
    for name, fields in MODELS.items():
        found.setdefault(name.removesuffix(_SLIDING), {})[name] = _requirements(**fields)
    return found


def _requirements(*, gqa_ratio: int, **fields: Any) -> Requirements:
    return Requirements(num_q_heads=fields["num_kv_heads"] * gqa_ratio, dtype="bfloat16", paged=True, **fields)


def decide(
    models: Mapping[str, Model], devices: Mapping[str, Device], *, installed: Device | None = None
) -> tuple[Decision, ...]:
    """
    Decide for each model on each device.

    Args:
        models: The models.
        devices: The devices, by the name that a reader sees.
        installed: The device for which only backends that are ready are chosen; for others, and for all where this is
            None, what plugins require is supposed to be installed.
    """
    return tuple(
        _decide(model, layers, name, device, assume_installed=device != installed)
        for model, layers in models.items()
        for name, device in devices.items()
    )


def _decide(model: str, layers: Model, name: str, device: Device, *, assume_installed: bool) -> Decision:
    try:
        found = plan(layers, device, assume_installed=assume_installed)
    except NoBackendError as error:
        return Decision(model, name, (), failure=error.summary)
    selections = [group.selection for group in found.groups]
    because = (f"{each.id}: {each.decided_by}" for each in selections if each.decided_by)
    return Decision(
        model,
        name,
        tuple(dict.fromkeys(each.id for each in selections)),
        tuple(dict.fromkeys(because)),
        unverified=tuple(dict.fromkeys(_unverified(found))),
    )


def _unverified(found: Plan) -> Iterator[str]:
    for group in found.groups:
        yield from (f"{group.selection.id}: {item}" for item in group.selection.unverified)
