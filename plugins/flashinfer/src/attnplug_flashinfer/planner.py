"""Plans the steps of one plan key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug_flashinfer.kinds import kinds_of
from attnplug_flashinfer.plan import Part, Plan
from attnplug_flashinfer.wrappers import Wrapper, WrapperPool

if TYPE_CHECKING:
    from attnplug.contract import AttentionImpl, State
    from attnplug_flashinfer.arrays import Buffers, Rows, Step


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
        self._pools = {kind: WrapperPool(kind, state.device) for kind in self._kinds.values()}

    def plan(self, step: Step) -> Plan:
        """Plan a step."""
        parts = tuple(self._part(rows) for rows in step.parts)
        return Plan(parts, None if step.prefix is None else self._part(step.prefix))

    def captured(self, rows: Rows, buffers: Buffers) -> CapturedPlan:
        """Return the plan of a slot, which is not planned yet."""
        return CapturedPlan(Wrapper(self._kinds[rows.kind], self._device, buffers), rows)

    def _part(self, rows: Rows) -> Part:
        lease = self._pools[self._kinds[rows.kind]].take()
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
