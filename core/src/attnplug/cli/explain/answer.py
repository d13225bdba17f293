"""What one device answers: an explanation for each group of layers, and the plan that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from attnplug.cli.explain.question import ONE_LAYER
from attnplug.commands import describe_error
from attnplug.errors import NoBackendError
from attnplug.selection.plan import Plan, plan
from attnplug.selection.select import explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements
    from attnplug.selection.explanation import Explanation
    from attnplug.selection.selection import Selection


@frozen
class Part:
    """
    Layers that ask for the same, and what became of it.

    Attributes:
        layers: Their names; one empty name where a single layer was described by options.
        explanation: Every candidate's answer.
    """

    layers: tuple[str, ...]
    explanation: Explanation

    def decided(self, selection: Selection) -> Part:
        """Return the part as a plan decided it, which may be otherwise than for these layers alone."""
        return Part(self.layers, evolve(self.explanation, chosen=selection, verdicts=selection.verdicts))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"layers": [name for name in self.layers if name], **self.explanation.to_dict()}


@frozen
class Answer:
    """
    The answer of one device.

    Attributes:
        device: The device.
        parts: One part for each distinct group of layers; the one with most layers first.
        plan: The decision for all of them together; None where there is one layer, or no such decision.
        failure: Why there is none.
    """

    device: Device
    parts: tuple[Part, ...]
    plan: Plan | None = None
    failure: NoBackendError | None = None

    @property
    def serves(self) -> bool:
        """Whether everything that was asked can be served."""
        return self.failure is None and all(part.explanation.chosen is not None for part in self.parts)

    def plan_to_dict(self) -> dict[str, Any]:
        """Return the plan, or why there is none, as plain JSON values."""
        device = {"device": self.device.to_dict()}
        if self.plan is None:
            return {**device, "error": describe_error(self.failure) if self.failure else None}
        groups = [{"layers": list(group.layers), "id": group.selection.id} for group in self.plan.groups]
        return {
            **device,
            "block_size": self.plan.block_size,
            "kv_layout": self.plan.kv_layout,
            "cudagraph": self.plan.cudagraph,
            "weakest": self.plan.weakest.selection.id,
            "groups": groups,
        }


def answer(layers: Mapping[str, Requirements], device: Device, *, assume_installed: bool, **keywords: Any) -> Answer:
    """
    Ask one device about all layers.

    Args:
        layers: What each layer asks, by name.
        device: The device.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there.
        keywords: ``backend`` and ``options``, as for `select`.
    """
    parts = _each(layers, device, assume_installed=assume_installed, **keywords)
    if ONE_LAYER in layers:
        return Answer(device, parts)
    try:
        decided = plan(layers, device, assume_installed=assume_installed, **keywords)
    except NoBackendError as failure:
        return Answer(device, parts, failure=failure)
    chosen = {group.selection.requirements: group.selection for group in decided.groups}
    return Answer(device, tuple(part.decided(chosen[part.explanation.requirements]) for part in parts), decided)


def _each(layers: Mapping[str, Requirements], device: Device, **keywords: Any) -> tuple[Part, ...]:
    names: dict[Requirements, list[str]] = {}
    for name, asked in layers.items():
        names.setdefault(asked, []).append(name)
    groups = sorted(names.items(), key=lambda item: -len(item[1]))
    return tuple(Part(tuple(group), explain(asked, device, **keywords)) for asked, group in groups)
