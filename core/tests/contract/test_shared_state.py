"""Agreements of one cache group share a state: workspace, graph buffers, limits, and one step for all."""

from __future__ import annotations

import pytest
import torch

from attnplug.contract import GraphShape, MetadataBuilder
from attnplug.errors import LimitsError, NotNegotiatedError
from core.tests.contract.test_graphs import Capturing, CapturingBackend
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import limits, make_backend, make_batch, make_layer, refused


class Working(ToyBackend):
    """Needs a workspace by its window."""

    builder_class = Capturing

    def workspace_bytes(self, limits):
        return (self.agreement.requirements.sliding_window or 1) * limits.max_num_reqs


def builder_of(state, cls=Working, level="always", **requested):
    backend = make_backend(cls, agreed_graphs=level, **requested)
    return backend.make_builder([make_layer(backend)], state)


@pytest.fixture
def state():
    return make_backend(Working, agreed_graphs="always").make_state(limits())


# --- workspace ----------------------------------------------------------------------------------------------------


def test_the_workspace_has_room_for_every_agreement(state):
    builder_of(state)
    assert state.workspace.numel() == 16
    held = state.workspace

    builder_of(state, sliding_window=8)
    builder_of(state, sliding_window=3)

    assert state.workspace.numel() == 128
    assert not state.workspace.any()
    assert held.numel() == 16  # who holds the old one still has room for its agreement


def test_the_agreement_that_needs_most_may_come_first():
    large = make_backend(Working, sliding_window=8)
    small = make_backend(Working)
    assert small.make_builder([make_layer(small)], large.make_state(limits())).state.workspace.numel() == 128


def test_a_workspace_that_graphs_hold_does_not_grow(state):
    builder_of(state)
    with state.graph_capture(2):
        with refused(LimitsError, problem="a workspace of 16 bytes", expected="needs 128", fix="before its first"):
            builder_of(state, sliding_window=8)
        state.graph(GraphShape(2, 2, 1))
    held = state.workspace
    with refused(LimitsError, problem="which graphs hold", expected="needs 128", fix="release_graphs"):
        builder_of(state, sliding_window=8)
    assert state.workspace is held
    builder_of(state, sliding_window=1)  # which fits

    state.release_graphs()
    builder_of(state, sliding_window=8)
    assert state.workspace.numel() == 128


# --- levels -------------------------------------------------------------------------------------------------------


def test_a_shape_is_captured_for_the_agreement_that_allows_it():
    """What one agreement excludes runs eagerly in it; the others capture."""
    eager = make_backend(CapturingBackend, agreed_graphs="never")
    state = eager.make_state(limits())
    first = eager.make_builder([make_layer(eager)], state)
    with refused(NotNegotiatedError, problem="capture"):
        state.begin_capture(4)
    decodes = builder_of(state, CapturingBackend, "single_token_decode")
    mixed = builder_of(state, CapturingBackend, "always", sliding_window=3)
    with state.graph_capture(4):
        for builder, key in ((decodes, GraphShape(4, 4, 1)), (mixed, GraphShape(4, 4, 1)), (mixed, GraphShape(4, 16))):
            graph = state.graph(key)
            builder.build(graph.dummy_batch(builder), graph=graph)

    decode, prefill = make_batch([1, 1], [5, 9]), make_batch([1, 5], [5, 9])
    found = [
        state.find_graph(dict.fromkeys(builders, batch))
        for builders, batch in (
            ((decodes, mixed), decode),
            ((decodes, mixed), prefill),
            ((mixed,), prefill),
            ((first, mixed), decode),
        )
    ]
    assert [graph and graph.key for graph in found] == [GraphShape(4, 4, 1), None, GraphShape(4, 16), None]


def test_a_builder_that_failed_adds_no_agreement():
    class Broken(MetadataBuilder):
        def __init__(self, *given):
            raise RuntimeError

    eager = make_backend(CapturingBackend, agreed_graphs="never")
    state = eager.make_state(limits())
    with pytest.raises(RuntimeError):
        builder_of(state, type("B", (ToyBackend,), {"builder_class": Broken}))
    with pytest.raises(NotNegotiatedError):
        state.begin_capture(4)


# --- one step for all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4), (4, 2)])
def test_one_step_builds_for_every_agreement(state, sizes):
    builders = [
        builder_of(state, block_size=size, sliding_window=window) for size, window in zip(sizes, (None, 8), strict=True)
    ]
    with state.graph_capture(4):
        graph = state.graph(GraphShape(4, 4, 1))
        captured = [builder.build(graph.dummy_batch(builder), graph=graph) for builder in builders]
    for lens in ([5, 9], [3, 30, 2], [12]):
        batches = {
            builder: make_batch([1] * len(lens), lens, block_size=size)
            for builder, size in zip(builders, sizes, strict=True)
        }
        step = state.begin_forward(batches)
        assert step.graph is graph
        for builder, metadata in zip(builders, captured, strict=True):
            table = batches[builder].block_table
            assert torch.equal(metadata.batch.block_table[: len(lens), : table.shape[1]], table)
            assert metadata.batch.seq_lens.tolist() == lens + [0] * (4 - len(lens))
