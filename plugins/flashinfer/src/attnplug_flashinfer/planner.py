"""Plans the steps of one plan key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug_flashinfer.kinds import kinds_of
from attnplug_flashinfer.plan import Part, Plan
from attnplug_flashinfer.wrappers import Pool, Wrapper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.contract import AttentionImpl, State
    from attnplug_flashinfer.arrays import Buffers, Rows


class Planner:
    """
    Plans eager steps, in wrappers that it keeps.

    Args:
        impl: A layer of the plan key.
        state: Whose workspace is used.
    """

    def __init__(self, impl: AttentionImpl, state: State) -> None:
        self._device = state.device
        self._kinds = kinds_of(impl, state.workspace)
        self._pools = {kind: Pool(kind, state.device) for kind in self._kinds.values()}

    def plan(self, step: Mapping[str, Rows]) -> Plan:
        """Plan a step, whose rows have the names of kinds."""
        parts = {name: self._part(name, rows) for name, rows in step.items()}
        prefix = parts.pop("prefix", None)
        return Plan(tuple(parts.values()), prefix)

    def captured(self, name: str, rows: Rows, buffers: Buffers) -> CapturedPlan:
        """Return the plan of a slot, which is not planned yet."""
        return CapturedPlan(Wrapper(self._kinds[name], self._device, buffers), rows)

    def _part(self, name: str, rows: Rows) -> Part:
        lease = self._pools[self._kinds[name]].take()
        lease.wrapper.plan(rows)
        return Part(lease.wrapper.run, rows.first, rows.last, lease)


class CapturedPlan:
    """
    The plan of a slot: one wrapper, which is planned again before each replay.

    Args:
        wrapper: The wrapper, with the slot's buffers.
        rows: The rows of the captured shape.
    """

    def __init__(self, wrapper: Wrapper, rows: Rows) -> None:
        self._wrapper = wrapper
        self._plan = Plan((Part(wrapper.run, rows.first, rows.last),))

    def write(self, rows: Rows) -> Plan:
        """Plan the next replay."""
        self._wrapper.plan(rows)
        return self._plan
