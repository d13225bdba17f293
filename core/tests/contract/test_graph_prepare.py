"""Preparation inside a graph: by the host's call in the capture, or by each build where the host makes none."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import GraphShape, capture
from attnplug.errors import BatchError
from core.tests.contract.test_graphs import Capturing, world
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import make_batch, make_builder, refused

CPU = torch.device("cpu")
SHAPE = GraphShape(2, 2, 1)


class Doubling(Capturing):
    """Keeps twice the lengths, which it computes on the device."""

    replays_without_build = True

    def plan_batch(self, batch, split, *, fast, graph):
        if graph is None:
            return {"plans": dict.fromkeys(self.plan_groups, batch.seq_lens * 2)}
        return {"plans": dict.fromkeys(self.plan_groups, self.kept(graph))}

    def prepare_in_graph(self, metadata):
        self.prepared = getattr(self, "prepared", 0) + 1
        torch.mul(metadata.batch.seq_lens, 2, out=self.kept(metadata.graph))

    def kept(self, graph):
        return self.per_graph(graph, "twice", lambda: torch.zeros(graph.key.num_reqs, dtype=torch.int32))


DoublingBackend = type("DoublingBackend", (ToyBackend,), {"builder_class": Doubling})


def captured(builder, *, prepares, shape=SHAPE, batch=None):
    """Capture a step whose result is the plan, with or without the preparation inside; return result and replay."""
    recorded = []
    with builder.state.graph_capture(4):
        graph = builder.state.graph(shape, host_owned_inputs=batch is not None)
        metadata = builder.build(graph.dummy_batch(builder) if batch is None else batch, graph=graph)

        def step():
            if prepares:
                recorded.append(builder.prepare(metadata))
            return builder.impls[0].wrapped.plan_of(metadata).clone()

        result, replay = capture(step, CPU)
    assert recorded == [True] * prepares
    return graph, metadata, result, replay


@pytest.mark.parametrize("prepares", [True, False])
def test_a_replay_is_prepared_once(prepares):
    """By the build where the graph does not record it, otherwise by the replay alone."""
    _, _, builder = world(cls=DoublingBackend)
    graph, _, result, replay = captured(builder, prepares=prepares)
    builder.wrapped.prepared = 0

    for lens in ([5, 9], [3, 2], [60, 1]):
        builder.build(make_batch([1, 1], lens), graph=graph)
        replay()
        assert result.tolist() == [2 * length for length in lens]

    assert builder.wrapped.prepared == 3


def test_a_build_leaves_out_what_the_graph_records():
    _, _, builder = world(cls=DoublingBackend)
    graph, metadata, _, _ = captured(builder, prepares=True)
    builder.build(make_batch([1, 1], [5, 9]), graph=graph)
    assert builder.impls[0].wrapped.plan_of(metadata).tolist() == [4, 4]  # of the dummy batch: the replay writes it


def test_preparing_outside_a_capture_changes_nothing():
    """Warm-up runs of a captured call prepare too; builds go on to, since no graph has recorded it."""
    _, impl, builder = world(cls=DoublingBackend)
    with builder.state.graph_capture(4):
        graph = builder.state.graph(SHAPE)
        metadata = builder.build(graph.dummy_batch(builder), graph=graph)
    assert not builder.prepare(metadata)
    builder.build(make_batch([1, 1], [5, 9]), graph=graph)
    assert impl.wrapped.plan_of(metadata).tolist() == [10, 18]
    assert not builder.prepare(builder.build(make_batch([1], [3])))  # eager metadata: there is nothing to do


def test_inputs_that_change_on_the_device_need_no_build():
    _, _, builder = world(cls=DoublingBackend)
    batch = make_batch([1, 1], [5, 3], width=16)
    assert builder.replays_without_build
    _, _, result, replay = captured(builder, prepares=True, batch=batch)
    for _ in range(3):
        batch.seq_lens.add_(1)
        replay()
        assert torch.equal(result, batch.seq_lens * 2)


def test_several_shapes_and_builders_prepare_for_themselves():
    backend, impl, builder = world(cls=DoublingBackend)
    other = backend.make_builder([impl], builder.state)
    with builder.state.graph_capture(4):
        graphs = [builder.state.graph(GraphShape(size, size, 1)) for size in (4, 2)]
        pairs = [(each, graph) for graph in graphs for each in (builder, other)]
        made = {(each, graph): each.build(graph.dummy_batch(each), graph=graph) for each, graph in pairs}
        capture(lambda: builder.prepare(made[builder, graphs[0]]), CPU)
    batch = make_batch([1, 1], [5, 9])
    for graph in graphs:
        for each in (builder, other):
            each.build(batch, graph=graph)
    plans = {key: impl.wrapped.plan_of(metadata).tolist()[:2] for key, metadata in made.items()}
    assert plans.pop((builder, graphs[0])) == [4, 4]
    assert all(plan == [10, 18] for plan in plans.values())


def test_an_aborted_capture_recorded_nothing():
    _, impl, builder = world(cls=DoublingBackend)
    with builder.state.graph_capture(4):
        graph = builder.state.graph(SHAPE)
        metadata = builder.build(graph.dummy_batch(builder), graph=graph)
    builder.state.begin_capture(4)
    capture(lambda: builder.prepare(metadata), CPU)
    builder.state.abort_capture()
    builder.build(make_batch([1, 1], [5, 9]), graph=graph)
    assert impl.wrapped.plan_of(metadata).tolist() == [10, 18]


def test_metadata_of_others_is_refused():
    backend, impl, builder = world(cls=DoublingBackend)
    other = backend.make_builder([impl], builder.state)
    graph, metadata, _, _ = captured(builder, prepares=False)
    before = builder.build(make_batch([1], [4]), graph=graph)
    latest = builder.build(make_batch([1], [5]), graph=graph)
    builder.prepare(metadata)
    builder.prepare(latest)
    with refused(BatchError, problem="given to prepare", expected="another builder", fix="last build"):
        other.prepare(metadata)
    with refused(BatchError, problem="given to prepare", expected="overwritten"):
        builder.prepare(before)
    with refused(BatchError, problem="another builder", fix="returned"):
        make_builder(backend, impl).prepare(evolve(metadata, agreement=world(sliding_window=3)[0].agreement))
    builder.state.release_graphs()
    with refused(BatchError, problem="GraphBuffers", expected="released"):
        builder.prepare(metadata)


def test_a_builder_prepares_nothing_by_default():
    _, _, builder = world()
    graph, metadata, _, _ = captured_nothing(builder)
    assert not builder.replays_without_build
    assert builder.build(make_batch([1], [5]), graph=graph).batch.seq_lens is not None
    assert metadata.batch.seq_lens.tolist() == [5, 0]


def captured_nothing(builder):
    with builder.state.graph_capture(4):
        graph = builder.state.graph(SHAPE)
        metadata = builder.build(graph.dummy_batch(builder), graph=graph)
        result, replay = capture(lambda: builder.prepare(metadata), CPU)
    return graph, metadata, result, replay
