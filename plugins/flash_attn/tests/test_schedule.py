"""Schedules are made once per step for each pass, and stay in one place where a graph reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve, fields

from attnplug import Requirements
from attnplug.contract import Batch, GraphShape, Layer, Limits, Parallel
from attnplug.errors import PluginContractError
from attnplug_flash_attn import builder as building
from attnplug_flash_attn.kernels.interface import VarlenCall
from attnplug_flash_attn.passes import KernelPass, Plan, with_schedule
from attnplug_flash_attn.schedule import _mapped, longest_schedule
from plugins.flash_attn.tests.recording_kernels import load
from tests.backends.harness import MODEL, Harness

LIMITS = Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=128, capture_sizes=(10,))


class Captured(Harness):
    """A backend that makes schedules, with graph buffers of several shapes."""

    limits = LIMITS

    def __init__(self, *keys: GraphShape, **required: Any) -> None:
        super().__init__(load, variant="scheduled", **{"cudagraph": "always", **required})
        with self.state.graph_capture(8):
            self.graphs = [self.state.graph(key) for key in keys]
            for graph in self.graphs:
                self.builder.build(graph.dummy_batch(self.builder), graph=graph)

    def schedule(self, number: int, *lens: Any) -> torch.Tensor:
        metadata = self.builder.build(self.batch(*lens), graph=self.graphs[number])
        (part,) = self.impls[0].wrapped.plan_of(metadata).parts
        self.forward(metadata)  # the kernels compare the schedule with what they make themselves
        return part.call.scheduler_metadata


def memory_of(schedule: torch.Tensor) -> torch.Tensor:
    """The memory that holds a schedule."""
    size = schedule.untyped_storage().nbytes() // 4
    return schedule.as_strided((size,), (1,), 0)


def test_each_pass_has_its_own_schedule() -> None:
    harness = Harness(load, variant="scheduled", cascade=True)
    plan = harness.impls[0].wrapped.plan_of(harness.builder.build(harness.batch([1, 5], [9, 20])))

    made = [part.call.scheduler_metadata for part in plan.parts]
    assert all(schedule is not None for schedule in made)
    assert made[0] is not made[1]
    assert [call.max_seqlen_q for call in harness.backend.wrapped.kernels.scheduled] == [1, 5]


@pytest.mark.parametrize("ranks", [2, 4])
def test_cached_keys_of_ranks_are_scheduled_for_the_heads_of_all(monkeypatch, ranks) -> None:
    """New tokens come with the call, and have no schedule."""
    monkeypatch.setattr(building, "Ranks", lambda parallel, device: object())
    backend, required = load(Requirements(**MODEL, dcp_size=ranks), "scheduled"), []
    monkeypatch.setattr(
        backend.wrapped.kernels, "schedule", lambda call, params, *, num_heads_q: required.append((call, num_heads_q))
    )
    state = backend.make_state(evolve(LIMITS, capture_sizes=()), Parallel(dcp_size=ranks))
    builder = backend.make_builder([backend.make_impl(Layer(name="layers.0"))], state)
    shares, nowhere = torch.tensor([20, 20], dtype=torch.int32), torch.full((6,), -1)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    more = {"block_table": table, "slot_mapping": nowhere, "dcp_local_seq_lens": shares}
    metadata = builder.build(Batch.from_lengths([1, 5], [20 * ranks] * 2, **more))

    (plan,) = metadata.plans.values()
    assert [(call.causal, heads) for call, heads in required] == [(False, ranks * MODEL["num_q_heads"])]
    assert plan.dcp.new.scheduler_metadata is None


def test_a_fast_build_makes_no_schedule() -> None:
    harness = Harness(load, variant="scheduled")
    plan = harness.impls[0].wrapped.plan_of(harness.builder.build(harness.batch([1, 5], [9, 20]), fast=True))

    assert all(part.call.scheduler_metadata is None for part in plan.parts)
    assert not harness.backend.wrapped.kernels.scheduled


def test_a_graph_has_its_schedule_however_fast_it_is_built() -> None:
    harness = Captured(GraphShape(4, 4, 1))
    before = harness.schedule(0, [1, 1], [9, 20])
    metadata = harness.builder.build(harness.batch([1, 1, 1], [4, 5, 6]), fast=True, graph=harness.graphs[0])

    (part,) = harness.impls[0].wrapped.plan_of(metadata).parts
    assert part.call.scheduler_metadata.data_ptr() == before.data_ptr()
    harness.forward(metadata)


@pytest.mark.parametrize(
    ("reqs", "captured", "expected"), [(8, (10,), 49), (8, (), 33), (9, (), 49), (1, (), 17), (12, (4, 12), 49)]
)
def test_memory_is_for_the_largest_batch(reqs, captured, expected) -> None:
    limits = evolve(LIMITS, max_num_reqs=reqs, capture_sizes=captured)
    assert longest_schedule(limits) == expected


def test_graphs_share_one_memory_whose_tail_is_zero() -> None:
    harness = Captured(GraphShape(8, 8, 1), GraphShape(2, 2, 1), GraphShape(4, 24))
    large = harness.schedule(0, [1] * 8, [100] * 8)
    memory, place = memory_of(large), large.data_ptr()
    assert memory.shape[0] == longest_schedule(LIMITS)
    assert not memory[large.shape[0] :].any()

    for number, lens in ((1, ([1, 1], [9, 20])), (0, ([1] * 3, [50] * 3)), (1, ([1], [3]))):
        schedule = harness.schedule(number, *lens)
        assert schedule.data_ptr() == place
        assert memory_of(schedule).data_ptr() == memory.data_ptr()
        assert not memory_of(schedule)[schedule.shape[0] :].any()

    prefills = harness.schedule(2, [7, 17], [9, 20])
    assert prefills.data_ptr() != place  # of another pass
    assert not memory_of(prefills)[prefills.shape[0] :].any()


def test_what_a_replay_may_have_written_is_zeroed() -> None:
    """Where graphs record their schedules, a build does not know how much of the memory the last replay took."""
    harness = Captured(GraphShape(8, 8, 1), GraphShape(2, 2, 1))
    memory = memory_of(harness.schedule(1, [1, 1], [9, 20]))
    (kept,) = harness.builder.wrapped._schedules._memories.values()
    kept.is_recorded = True
    memory.fill_(7)
    schedule = harness.schedule(1, [1, 1], [9, 20])
    assert not memory[schedule.shape[0] :].any()


def test_plans_of_a_graph_are_made_once() -> None:
    harness = Captured(GraphShape(4, 4, 1))
    built = [harness.builder.build(harness.batch(*lens), graph=harness.graphs[0]) for lens in ([[1, 1]], [[1], [60]])]
    first, second = (harness.impls[0].wrapped.plan_of(metadata) for metadata in built)

    assert first is second
    assert all(call.scheduler_metadata is None for call in harness.backend.wrapped.kernels.scheduled)


@pytest.mark.parametrize("longer", [1, -1, None])
def test_a_schedule_of_another_length_is_refused_in_a_graph(monkeypatch, longer) -> None:
    harness = Captured(GraphShape(4, 4, 1))
    kernels, graph, batch = harness.backend.wrapped.kernels, harness.graphs[0], harness.batch([1, 1], [9, 20])
    make = kernels.schedule

    def other(call: Any, params: Any, *, num_heads_q: int) -> torch.Tensor | None:
        made = make(call, params, num_heads_q=num_heads_q)
        return None if longer is None else torch.zeros(made.shape[0] + longer, dtype=torch.int32)

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "schedule", other)
        for _ in range(2):  # what was refused is not taken for the capture's
            with pytest.raises(PluginContractError, match=r"scheduler_metadata.* changed since the capture"):
                harness.builder.build(batch, graph=graph)
    harness.schedule(0, [1, 1], [9, 20])


@pytest.mark.parametrize("other", ["wider", "shifted"])
def test_another_block_table_of_the_host_is_refused_in_a_graph(other) -> None:
    harness = Captured()
    memory = torch.zeros(2, 12, dtype=torch.int32)
    batch = harness.batch([1, 1], [9, 20])
    memory[:, :2] = batch.block_table[:, :2]
    own = evolve(batch, block_table=memory[:, :8], block_table_cpu=memory[:, :8])
    with harness.state.graph_capture(8):
        graph = harness.state.graph(GraphShape(2, 2, 1), host_owned_inputs=True)
        harness.builder.build(own, graph=graph)
    wider = memory if other == "wider" else memory.as_strided((2, 8), (8, 1))
    wider.copy_(torch.nn.functional.pad(batch.block_table[:, :2], (0, wider.shape[1] - 2)))
    with pytest.raises(PluginContractError, match=r"block_table.* changed since the capture"):
        harness.builder.build(evolve(own, block_table=wider, block_table_cpu=wider), graph=graph)


def test_the_memory_is_freed_with_the_graphs() -> None:
    harness = Captured(GraphShape(4, 4, 1))
    assert len(harness.builder.wrapped._schedules._memories) == 1
    harness.graphs.clear()
    harness.state.release_graphs()
    harness.backend.wrapped.kernels.calls.clear()

    assert not harness.builder.wrapped._schedules._memories


def test_the_split_limit_of_captured_sizes_holds_for_eager_steps() -> None:
    limits = evolve(LIMITS, max_num_splits=6, capture_sizes=(4,))
    harness = Harness(load, variant="scheduled", cudagraph="always")
    builder = harness.backend.make_builder(harness.impls, harness.backend.make_state(limits))
    small, large = (builder.build(harness.batch([1] * count)) for count in (4, 5))

    assert [harness.impls[0].wrapped.plan_of(metadata).decode.call.num_splits for metadata in (small, large)] == [6, 0]
    assert [call.num_splits for call in harness.backend.wrapped.kernels.scheduled] == [6, 0]


def test_a_call_with_a_schedule_keeps_all_its_other_arguments():
    """Its copy names each argument, and one that is added later would be left out without an error."""
    values = {one.name: object() for one in fields(VarlenCall)}
    call: Any = VarlenCall(**values)  # type: ignore[arg-type] # only their identity counts

    found = with_schedule(call, schedule := torch.zeros(1, dtype=torch.int32))

    assert found.scheduler_metadata is schedule
    assert all(getattr(found, name) is value for name, value in values.items() if name != "scheduler_metadata")


def test_a_plan_with_schedules_keeps_all_that_is_no_call():
    kept: dict[str, Any] = {one.name: object() for one in fields(KernelPass) if one.name not in ("call", "rest")}
    call: Any = VarlenCall(cu_seqlens_q=torch.zeros(2, dtype=torch.int32), max_seqlen_q=1, max_seqlen_k=1)
    plan = Plan(decode=KernelPass(call, **kept), prefix=KernelPass(call, **kept), packed_context=None, dcp=None)
    changed = with_schedule(call, torch.zeros(1, dtype=torch.int32))

    found = _mapped(plan, lambda _name, _call: changed)

    for part in (found.decode, found.prefix):
        assert part is not None
        assert part.call is changed
        assert all(getattr(part, name) is value for name, value in kept.items())
    assert found.prefill is None
