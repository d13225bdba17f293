"""Schedules: the library's division of a call among multiprocessors, made once per step, and kept for graphs."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from attrs import define, evolve, frozen

from attnplug.errors import PluginContractError
from attnplug_flash_attn.passes import KernelPass, Plan, with_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from torch import Tensor

    from attnplug.contract import GraphBuffers, Limits, MetadataBuilder
    from attnplug_flash_attn.kernels.interface import Kernels, LayerParams, VarlenCall

_PASSES = ("decode", "prefill", "prefix")


@define(eq=False)
class GraphPlans:
    """
    The plans of a graph, for all its replays.

    Attributes:
        tensors: What `forms_of` returns for the tensors that they were made of.
        plans: The plan of each plan key.
        calls: What renews their schedules.
    """

    tensors: tuple[object, ...] = ()
    plans: Mapping[Hashable, Plan] = MappingProxyType({})
    calls: tuple[ScheduledCall, ...] = ()


def forms_of(*tensors: Tensor | None) -> tuple[object, ...]:
    """Return the address, the shape and the strides of each tensor: what a graph freezes of it."""
    return tuple([None if one is None else (one.data_ptr(), one.shape, one.stride()) for one in tensors])


def longest_schedule(limits: Limits) -> int:
    """Return the length of the longest schedule: four integers per request, rounded up to four requests, and one."""
    most = max(limits.max_num_reqs, *limits.capture_sizes, 1)
    return 1 + -(-most // 4) * 4 * 4


@define(eq=False)
class Memory:
    """
    The memory of a pass's schedules in graphs.

    Attributes:
        tensor: The memory, int32.
        used: How much of it the last schedule took, as far as this process has written it; zeros follow.
        is_recorded: Whether replays write it too.
    """

    tensor: Tensor
    used: int = 0
    is_recorded: bool = False


@frozen(eq=False)
class GraphSchedule:
    """
    The schedule of a pass in one graph.

    Attributes:
        memory: The memory, which other graphs use too.
        tensor: Its beginning, which the graph reads.
    """

    memory: Memory
    tensor: Tensor

    def write(self, schedule: Tensor) -> None:
        """
        Copy a schedule of the same length, and zero the rest. A graph may record it.

        Kernels would take the rest of a longer schedule for work, and overwrite the output.
        """
        count, memory = self.tensor.shape[0], self.memory
        if self.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            memory.is_recorded = True
        used = memory.tensor.shape[0] if memory.is_recorded else memory.used
        if used > count:
            memory.tensor[count:used].zero_()
        memory.used = count
        self.tensor.copy_(schedule)


@frozen(eq=False)
class ScheduledCall:
    """
    A call of a graph's plan, for all its replays.

    Attributes:
        call: The call without its schedule. Its tensors have the lengths of each step.
        params: The parameters of any layer of the plan key.
        memory: Where the schedule is, None where the library has none.
    """

    call: VarlenCall
    params: LayerParams
    memory: GraphSchedule | None


class Schedules:
    """
    Makes the schedules of a builder.

    Graphs share the memory of their schedules, one tensor for each pass of a plan key, since each build, or each
    replay, writes it before it is read.

    Args:
        builder: The builder.
        kernels: The kernel library.
    """

    def __init__(self, builder: MetadataBuilder, kernels: Kernels) -> None:
        self._builder = builder
        self._kernels = kernels
        self._memories: WeakValueDictionary[Hashable, Memory] = WeakValueDictionary()

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
            return call if schedule is None else with_schedule(call, schedule)

        return _mapped(plan, scheduled, heads * self._builder.parallel.dcp_size)

    def of_graph(
        self, plan: Plan, made: Plan, key: Hashable, params: LayerParams, graph: GraphBuffers
    ) -> Iterator[ScheduledCall]:
        """
        Yield what renews the schedules of a graph's plan.

        Args:
            plan: The plan without schedules, and without DCP.
            made: What `add` returned for it.
            key: Its plan key.
            params: The parameters of any layer of the plan key.
            graph: The graph.
        """
        with_schedules = dict(calls_of(made))
        for name, call in calls_of(plan):
            count = 0 if (found := with_schedules[name].scheduler_metadata) is None else found.shape[0]
            memory = None if found is None else self._kept(graph, (key, name), count)
            yield ScheduledCall(call, params, memory)

    def renew(self, calls: Iterable[ScheduledCall]) -> None:
        """
        Write the schedules of a graph again, from the lengths on the device. A graph may record it.

        Raises:
            PluginContractError: The library makes a schedule of another length than that of the capture.
        """
        heads = self._builder.agreement.requirements.num_q_heads
        for each in calls:
            schedule, memory = self._kernels.schedule(each.call, each.params, num_heads_q=heads), each.memory
            found = None if schedule is None else schedule.shape[0]
            expected = None if memory is None else memory.tensor.shape[0]
            if found != expected:
                raise PluginContractError(
                    f"{self._builder.agreement.id} made a scheduler_metadata of {found} integers, which changed since "
                    "the capture",
                    f"the graph reads {expected}: the length follows from the shape of the graph",
                    "report it with the version of the kernel library",
                )
            if schedule is not None and memory is not None:
                memory.write(schedule)

    def _copy_for_graph(self, schedule: Tensor, graph: GraphBuffers, name: Hashable) -> Tensor:
        """Copy a schedule into the memory of graphs, and return it there."""
        count = schedule.shape[0]
        kept = self._kept(graph, name, count)
        if kept.tensor.shape[0] != count:  # the comparison with the capture refuses it
            return schedule
        kept.write(schedule)
        return kept.tensor

    def _kept(self, graph: GraphBuffers, name: Hashable, count: int) -> GraphSchedule:
        return self._builder.per_graph(graph, ("schedule", name), lambda: self._memory(name, count))

    def _memory(self, name: Hashable, count: int) -> GraphSchedule:
        found = self._memories.get(name)
        if found is None or found.tensor.shape[0] < count:
            size = max(count, longest_schedule(self._builder.limits))
            found = Memory(torch.zeros(size, dtype=torch.int32, device=self._builder.state.device))
            self._memories[name] = found
        return GraphSchedule(found, found.tensor[:count])


def carried_over(plan: Plan, before: Plan) -> Plan:
    """
    Return a plan with the schedules of another plan, since they depend on lengths only.

    Args:
        plan: The new plan, for the same requests in other pages.
        before: The plan with schedules. That of another builder may read pages where this one reads new K/V.
    """
    calls = dict(calls_of(before))

    def carried(name: str, call: VarlenCall) -> VarlenCall:
        old = calls[name].scheduler_metadata
        reads_same = (call.block_table is None) == (calls[name].block_table is None)
        return with_schedule(call, old) if reads_same else call

    return _mapped(plan, carried)


def _mapped(plan: Plan, change: Callable[..., VarlenCall], *heads_of_context: int) -> Plan:
    """Return a plan with changed calls. The context pass of DCP has the query heads of all ranks."""

    def changed(name: str, old: KernelPass) -> KernelPass:
        call = change(name, old.call)
        return KernelPass(call, old.first, old.last, old.slots, old.reads_new_kv, old.buffers, old.rest, old.padding)

    dcp = plan.dcp
    if dcp is not None and dcp.context is not None:
        dcp = evolve(dcp, context=change("context", dcp.context, *heads_of_context))
    decode = None if plan.decode is None else changed("decode", plan.decode)
    prefill = None if plan.prefill is None else changed("prefill", plan.prefill)
    prefix = None if plan.prefix is None else changed("prefix", plan.prefix)
    return Plan(decode, prefill, prefix, dcp, plan.packed_context)


def calls_of(plan: Plan) -> Iterator[tuple[str, VarlenCall]]:
    """Yield the calls, by name. The pass over new tokens of DCP has no schedule."""
    for name in _PASSES:
        found: KernelPass | None = getattr(plan, name)
        if found is not None:
            yield name, found.call
    if plan.dcp is not None and plan.dcp.context is not None:
        yield "context", plan.dcp.context
