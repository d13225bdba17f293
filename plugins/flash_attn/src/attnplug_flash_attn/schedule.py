"""Schedules: the library's division of a call among multiprocessors, made once per step, and kept for graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from attrs import evolve

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import Tensor

    from attnplug.contract import GraphBuffers, Limits, MetadataBuilder
    from attnplug_flash_attn.kernels.interface import Kernels, LayerParams, VarlenCall
    from attnplug_flash_attn.passes import KernelPass, Plan

_PASSES = ("decode", "prefill", "prefix")


def longest_schedule(limits: Limits) -> int:
    """Return the length of the longest schedule: four integers per request, rounded up to four requests, and one."""
    most = max(limits.max_num_reqs, *limits.capture_sizes, 1)
    return 1 + -(-most // 4) * 4 * 4


class Schedules:
    """
    Makes the schedules of a builder.

    Graphs share the memory of their schedules, one tensor for each pass of a plan key, since each build writes it
    before its replay.

    Args:
        builder: The builder.
        kernels: The kernel library.
    """

    def __init__(self, builder: MetadataBuilder, kernels: Kernels) -> None:
        self._builder = builder
        self._kernels = kernels
        self._memories: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()

    def add(self, plan: Plan, key: Hashable, params: LayerParams, graph: GraphBuffers | None) -> Plan:
        """
        Return the plan with a schedule in each pass for which the library has one.

        Args:
            plan: The plan of a step.
            key: Its plan key.
            params: The parameters of any layer of the plan key.
            graph: The graph of the build; None for eager steps.
        """
        heads = self._builder.agreement.requirements.num_q_heads

        def scheduled(name: str, call: VarlenCall, num_heads_q: int = heads) -> VarlenCall:
            schedule = self._kernels.schedule(call, params, num_heads_q=num_heads_q)
            if schedule is not None and graph is not None:
                schedule = self._copy_for_graph(schedule, graph, (key, name))
            return call if schedule is None else evolve(call, scheduler_metadata=schedule)

        return _mapped(plan, scheduled, heads * self._builder.parallel.dcp_size)

    def _copy_for_graph(self, schedule: Tensor, graph: GraphBuffers, name: Hashable) -> Tensor:
        """
        Copy a schedule into the memory of graphs, and zero the rest.

        Kernels would take the rest of a longer schedule for work, and overwrite the output.
        """
        count = schedule.shape[0]
        memory = self._builder.per_graph(graph, ("schedule", name), lambda: self._memory(name, count))
        memory[:count].copy_(schedule)
        memory[count:].zero_()
        return memory[:count]

    def _memory(self, name: Hashable, count: int) -> Tensor:
        found = self._memories.get(name)
        if found is None or found.shape[0] < count:
            size = max(count, longest_schedule(self._builder.limits))
            found = torch.zeros(size, dtype=torch.int32, device=self._builder.state.device)
            self._memories[name] = found
        return found


def carried_over(plan: Plan, before: Plan) -> Plan:
    """
    Return a plan with the schedules of another plan, since they depend on lengths only.

    Args:
        plan: The new plan, for the same requests in other pages.
        before: The plan with schedules. That of another builder may read pages where this one reads new K/V.
    """
    calls = dict(calls_of(before))

    def with_schedule(name: str, call: VarlenCall) -> VarlenCall:
        old = calls[name].scheduler_metadata
        reads_same = (call.block_table is None) == (calls[name].block_table is None)
        return evolve(call, scheduler_metadata=old) if reads_same else call

    return _mapped(plan, with_schedule)


def _mapped(plan: Plan, change: Callable[..., VarlenCall], *heads_of_context: int) -> Plan:
    """Return a plan with changed calls. The context pass of DCP has the query heads of all ranks."""
    made: dict[str, Any] = {}
    for name, call in calls_of(plan):
        if name == "context" and plan.dcp is not None:
            made["dcp"] = evolve(plan.dcp, context=change(name, call, *heads_of_context))
        else:
            made[name] = evolve(getattr(plan, name), call=change(name, call))
    return evolve(plan, **made)


def calls_of(plan: Plan) -> Iterator[tuple[str, VarlenCall]]:
    """Yield the calls, by name. The pass over new tokens of DCP has no schedule."""
    for name in _PASSES:
        found: KernelPass | None = getattr(plan, name)
        if found is not None:
            yield name, found.call
    if plan.dcp is not None and plan.dcp.context is not None:
        yield "context", plan.dcp.context
