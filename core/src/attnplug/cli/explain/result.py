"""The result for one device: an explanation for each group of layers, and the plan that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from attnplug.cli.explain.request import ONE_LAYER
from attnplug.commands import describe_error
from attnplug.errors import NoBackendError
from attnplug.negotiation.candidate import CACHE_TERMS
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
        prefills: The same for the uncompressed prefills of layers with latents. They need not be served: absorbed
            attention serves prefills too.
    """

    device: Device
    groups: tuple[LayerGroup, ...]
    plan: Plan | None = None
    failure: NoBackendError | None = None
    prefills: tuple[LayerGroup, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether everything requested can be served."""
        return self.failure is None and all(group.explanation.chosen is not None for group in self.groups)

    def plan_to_dict(self, statuses: Collection[str] = ()) -> dict[str, Any]:
        """
        Return the plan, or the error of a plan that fails, as plain JSON values.

        Args:
            statuses: As for `LayerGroup.to_dict`, of uncompressed prefills.
        """
        found: dict[str, Any] = {"device": self.device.to_dict()}
        if self.plan is None:
            found["error"] = describe_error(self.failure) if self.failure else None
        else:
            found |= {name: getattr(self.plan, name) for name in (*CACHE_TERMS, "cudagraph")}
            found["weakest"] = self.plan.weakest.selection.id
            found["groups"] = [{"layers": list(group.layers), "id": group.selection.id} for group in self.plan.groups]
        if self.prefills:
            found["uncompressed_prefills"] = [group.to_dict(statuses) for group in self.prefills]
        return found


def explain_layers(
    layers: Mapping[str, Requirements],
    device: Device,
    *,
    assume_installed: bool,
    prefills: Mapping[str, Requirements] | None = None,
    **keywords: Any,
) -> Result:
    """
    Explain the choice for all layers on one device.

    Args:
        layers: What each layer requests, by name.
        device: The device.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there.
        prefills: What the uncompressed prefills of layers with latents request, by layer.
        keywords: ``backend`` and ``options``, as for `select`.
    """
    groups = explain_groups(layers, device, assume_installed=assume_installed, **keywords)
    if ONE_LAYER in layers:
        return Result(device, groups)
    others = explain_groups(prefills or {}, device, assume_installed=assume_installed, **keywords)
    try:
        decided = plan(layers, device, assume_installed=assume_installed, **keywords)
    except NoBackendError as failure:
        return Result(device, groups, failure=failure, prefills=others)
    chosen = {group.selection.requirements: group.selection for group in decided.groups}
    groups = tuple(group.decided(chosen[group.explanation.requirements]) for group in groups)
    return Result(device, groups, decided, prefills=others)


def explain_groups(layers: Mapping[str, Requirements], device: Device, **keywords: Any) -> tuple[LayerGroup, ...]:
    """Return an explanation for each distinct request, that of most layers first; keywords as for `explain`."""
    names: dict[Requirements, list[str]] = {}
    for name, requirements in layers.items():
        names.setdefault(requirements, []).append(name)
    groups = sorted(names.items(), key=lambda item: -len(item[1]))
    return tuple(LayerGroup(tuple(group), explain(each, device, **keywords)) for each, group in groups)
