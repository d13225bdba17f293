"""The result for one device: an explanation for each group of layers, and the plan that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from attnplug.cli.explain.request import ONE_LAYER
from attnplug.commands import describe_error
from attnplug.errors import NoBackendError
from attnplug.selection.plan import Plan, plan
from attnplug.selection.select import explain

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements
    from attnplug.selection.explanation import Explanation
    from attnplug.selection.selection import Selection


@frozen
class LayerGroup:
    """
    Layers that request the same, and the explanation of what is chosen for them.

    Attributes:
        layers: Their names; one empty name where a single layer was described by options.
        explanation: The verdict on every candidate.
    """

    layers: tuple[str, ...]
    explanation: Explanation

    def decided(self, selection: Selection) -> LayerGroup:
        """Return the group as a plan decided it, which may be otherwise than for these layers alone."""
        return LayerGroup(self.layers, evolve(self.explanation, chosen=selection, verdicts=selection.verdicts))

    def to_dict(self, statuses: Collection[str] = ()) -> dict[str, Any]:
        """
        Return plain JSON values.

        Args:
            statuses: The verdicts to include; empty for all of them.
        """
        found = self.explanation.to_dict()
        found["verdicts"] = [each for each in found["verdicts"] if not statuses or each["status"] in statuses]
        return {"layers": [name for name in self.layers if name], **found}


@frozen
class Result:
    """
    The result for one device.

    Attributes:
        device: The device.
        groups: The groups of layers; the one with most layers first.
        plan: The decision for all of them together; None where there is one layer, or no such decision.
        failure: Why there is none.
    """

    device: Device
    groups: tuple[LayerGroup, ...]
    plan: Plan | None = None
    failure: NoBackendError | None = None

    @property
    def serves(self) -> bool:
        """Whether everything requested can be served."""
        return self.failure is None and all(group.explanation.chosen is not None for group in self.groups)

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
            "kv_cache_form": self.plan.kv_cache_form,
            "cudagraph": self.plan.cudagraph,
            "weakest": self.plan.weakest.selection.id,
            "groups": groups,
        }


def explain_layers(
    layers: Mapping[str, Requirements], device: Device, *, assume_installed: bool, **keywords: Any
) -> Result:
    """
    Explain the choice for all layers on one device.

    Args:
        layers: What each layer requests, by name.
        device: The device.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there.
        keywords: ``backend`` and ``options``, as for `select`.
    """
    groups = _groups(layers, device, assume_installed=assume_installed, **keywords)
    if ONE_LAYER in layers:
        return Result(device, groups)
    try:
        decided = plan(layers, device, assume_installed=assume_installed, **keywords)
    except NoBackendError as failure:
        return Result(device, groups, failure=failure)
    chosen = {group.selection.requirements: group.selection for group in decided.groups}
    return Result(device, tuple(group.decided(chosen[group.explanation.requirements]) for group in groups), decided)


def _groups(layers: Mapping[str, Requirements], device: Device, **keywords: Any) -> tuple[LayerGroup, ...]:
    names: dict[Requirements, list[str]] = {}
    for name, requirements in layers.items():
        names.setdefault(requirements, []).append(name)
    groups = sorted(names.items(), key=lambda item: -len(item[1]))
    return tuple(LayerGroup(tuple(group), explain(each, device, **keywords)) for each, group in groups)
