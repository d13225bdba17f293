"""What a build leaves for the forwards of one plan key, and what makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug_flashinfer.kinds import kinds_of
from attnplug_flashinfer.wrappers import PlannedWrapper, WrapperPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import AttentionImpl, State
    from attnplug_flashinfer.arrays import Buffers, Rows, Step
    from attnplug_flashinfer.wrappers import WrapperLease


@frozen(eq=False)
class Part:
    """
    Query rows that one planned wrapper attends.

    Attributes:
        run: The wrapper's `run`.
        first: The first row.
        last: The row behind the last one.
        lease: Keeps the wrapper from being planned for another step. None in graphs, which own their wrappers.
    """

    run: Callable[..., Any]
    first: int
    last: int
    lease: WrapperLease | None = None


@frozen(eq=False)
class Plan:
    """
    The planned wrappers of a step.

    Attributes:
        parts: All rows of the step, each in one part.
        prefix: The same rows, over the keys that all requests share; the parts then have the others.
    """

    parts: tuple[Part, ...]
    prefix: Part | None = None


class Planner:
    """
    Plans the steps of one plan key.

    Args:
        impl: A layer of the plan key.
        state: The state whose workspace is used.
    """

    def __init__(self, impl: AttentionImpl, state: State) -> None:
        self._device = state.device
        self._kinds = kinds_of(impl, state.workspace)
        self._pools = {kind: WrapperPool(kind, state.device) for kind in self._kinds.values()}

    def plan(self, step: Step) -> Plan:
        """Plan an eager step."""
        parts = tuple(self._part(rows) for rows in step.parts)
        return Plan(parts, None if step.prefix is None else self._part(step.prefix))

    def for_graph(self, rows: Rows, buffers: Buffers) -> GraphPlan:
        """Return the plan of a graph; it is not planned yet."""
        return GraphPlan(PlannedWrapper(self._kinds[rows.kind], self._device, buffers), rows)

    def _part(self, rows: Rows) -> Part:
        lease = self._pools[self._kinds[rows.kind]].take()
        lease.wrapper.plan(rows)
        return Part(lease.wrapper.run, rows.first, rows.last, lease)


class GraphPlan:
    """
    The plan of a graph: one wrapper, which is planned again before each replay.

    Args:
        wrapper: The wrapper, with the graph's buffers.
        rows: The rows of the captured shape.
    """

    def __init__(self, wrapper: PlannedWrapper, rows: Rows) -> None:
        self._wrapper = wrapper
        self._plan = Plan((Part(wrapper.run, rows.first, rows.last),))

    def update(self, rows: Rows) -> Plan:
        """Plan the next replay, and return the plan: the same object for all replays."""
        self._wrapper.plan(rows)
        return self._plan
