"""The life cycle of graph buffers in plain calls: begin a capture, make shapes, end or abort it, capture more later."""

from __future__ import annotations

import gc
import weakref
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.contract import GraphShape
from attnplug.errors import BatchError, LimitsError, NotNegotiatedError
from core.tests.contract.test_graphs import capture, world
from core.tests.contract.world import make_batch, refused
from tests.examples import examples
from tests.threads import together

SMALL, LARGE = GraphShape(2, 2, 1), GraphShape(8, 8, 1)


def capture_plainly(builder, most, *keys):
    """Capture shapes by plain calls, and return what the captures hold."""
    builder.state.begin_capture(most)
    graphs = [builder.state.graph(key) for key in keys]
    metadata = [builder.build(graph.dummy_batch(builder), graph=graph) for graph in graphs]
    builder.state.end_capture()
    return metadata


def test_plain_calls_make_what_the_context_makes():
    _, _, builder = world()
    _, _, other = world()

    (metadata,) = capture_plainly(builder, 8, LARGE)
    capture(other, LARGE)

    assert list(builder.state.graphs) == list(other.state.graphs) == [LARGE]
    step = builder.state.begin_forward({builder: make_batch([1, 1], [5, 9])})
    assert step.graph is builder.state.graph(LARGE)
    assert metadata.batch.seq_lens.tolist() == [5, 9, 0, 0, 0, 0, 0, 0]


def test_shapes_are_captured_one_at_a_time():
    """A host without a hook for the end of its captures opens one for each shape, between steps that replay."""
    _, _, builder = world()
    batch, seen = make_batch([1, 1], [5, 9]), []
    for most, key in ((8, LARGE), (8, GraphShape(4, 4, 1)), (3, SMALL)):
        seen += capture_plainly(builder, most, key)
        step = builder.state.begin_forward({builder: batch})
        assert step.graph.key == key
        assert all(metadata.batch.seq_lens[:2].tolist() == [5, 9] for metadata in seen)
    assert len({metadata.batch.seq_lens.data_ptr() for metadata in seen}) == 1


def test_a_later_capture_names_at_most_the_first_ones_batch():
    _, _, builder = world()
    capture_plainly(builder, 4, SMALL)
    with refused(LimitsError, problem="max_batch_size=8", expected="made for 4", fix="release_graphs"):
        builder.state.begin_capture(8)
    builder.state.begin_capture(3)
    with refused(LimitsError, expected="max_batch_size=3"):
        builder.state.graph(GraphShape(4, 4, 1))
    builder.state.end_capture()
    capture_plainly(builder, 4, GraphShape(4, 4, 1))


def test_without_graphs_a_larger_capture_may_follow():
    _, _, builder = world()
    builder.state.begin_capture(2)
    builder.state.end_capture()
    capture_plainly(builder, 8, LARGE)
    builder.state.release_graphs()
    (metadata,) = capture_plainly(builder, 16, GraphShape(16, 16, 1))
    assert metadata.batch.seq_lens.shape == (16,)


def test_captures_do_not_nest():
    _, _, builder = world()
    builder.state.begin_capture(4)
    builder.state.graph(SMALL)
    with refused(LimitsError, problem="max_batch_size=4", expected="active", fix="end each one"):
        builder.state.begin_capture(4)
    with refused(LimitsError, expected="active"), builder.state.graph_capture(4):
        pass
    assert builder.state.graph(GraphShape(4, 4, 1)).key.num_reqs == 4  # the first one goes on
    builder.state.end_capture()
    assert len(builder.state.graphs) == 2


@pytest.mark.parametrize("name", ["end_capture", "abort_capture"])
def test_closing_twice_does_nothing(name):
    _, _, builder = world()
    close = getattr(builder.state, name)
    close()
    capture_plainly(builder, 4, SMALL)
    close()
    close()
    assert list(builder.state.graphs) == [SMALL]


def test_an_aborted_capture_releases_what_it_made():
    _, _, builder = world()
    (kept,) = capture_plainly(builder, 4, SMALL)
    builder.state.begin_capture(4)
    graph = builder.state.graph(GraphShape(4, 4, 1))
    builder.build(graph.dummy_batch(builder), graph=graph)

    builder.state.abort_capture()

    assert list(builder.state.graphs) == [SMALL]
    with refused(BatchError, problem="GraphBuffers", expected="until they are released"):
        builder.build(make_batch([1], [5]), graph=graph)
    builder.state.begin_forward({builder: make_batch([1], [5])})
    assert kept.batch.seq_lens.tolist() == [5, 0]


def test_an_aborted_capture_leaves_older_buffers_alone():
    """A builder whose capture in older buffers failed has not captured: no step is replayed for it."""
    backend, impl, builder = world()
    capture_plainly(builder, 4, SMALL)
    late = backend.make_builder([impl], builder.state)
    builder.state.begin_capture(4)
    graph = builder.state.graph(SMALL)
    late.build(graph.dummy_batch(late), graph=graph)

    builder.state.abort_capture()

    batch = make_batch([1], [5])
    assert builder.state.find_graph({builder: batch}) is graph
    assert builder.state.find_graph({late: batch}) is None


def test_an_aborted_capture_frees_the_inputs_that_it_made():
    backend, impl, builder = world()
    (kept,) = capture_plainly(builder, 4, SMALL)
    late = backend.make_builder([impl], builder.state)
    builder.state.begin_capture(4)
    graph = builder.state.graph(GraphShape(4, 4, 1))
    made = late.build(graph.dummy_batch(late), graph=graph)
    gone = weakref.ref(made.batch.seq_lens)

    builder.state.abort_capture()
    del made, graph
    gc.collect()

    assert gone() is None
    builder.state.begin_forward({builder: make_batch([1], [5])})
    assert kept.batch.seq_lens.tolist() == [5, 0]


def test_no_graph_without_a_capture():
    _, _, builder = world()
    capture_plainly(builder, 4, SMALL)
    with refused(LimitsError, problem="GraphShape", expected="while a capture is active", fix="begin_capture"):
        builder.state.graph(LARGE)
    _, _, eager = world("never")
    with refused(NotNegotiatedError, problem="capture", fix="cudagraph"):
        eager.state.begin_capture(2)


def in_threads(count, call):
    """Run a call in threads that start at once; return what each returned, or the error that it raised."""
    barrier, results = Barrier(count), []

    def run():
        barrier.wait()
        try:
            results.append(call())
        except LimitsError as error:
            results.append(error)

    together(*[run] * count)
    return results


def test_one_of_several_threads_begins():
    _, _, builder = world()
    results = in_threads(8, lambda: builder.state.begin_capture(4))
    assert results.count(None) == 1
    assert all("active" in error.expected for error in results if error is not None)


def test_threads_get_the_same_buffers():
    _, _, builder = world()
    builder.state.begin_capture(4)
    graphs = in_threads(8, lambda: builder.state.graph(SMALL))
    assert {id(graph) for graph in graphs} == {id(builder.state.graph(SMALL))}


CALLS = st.one_of(
    st.tuples(st.just("begin"), st.integers(1, 6)),
    st.tuples(st.just("make"), st.integers(1, 6)),
    st.just(("end",)),
    st.just(("abort",)),
    st.just(("release",)),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(CALLS, max_size=14))
def test_any_order_of_calls_keeps_the_books(calls):
    """A model beside the state: sizes held, those before the capture, and the most requests that memory is for."""
    _, _, builder = world()
    state, held, most, before, limit = builder.state, set(), 0, None, 0
    for name, *given_ in calls:
        size = given_[0] if given_ else 0
        if name == "begin":
            allowed = before is None and (not held or size <= most)
            if allowed:
                state.begin_capture(size)
                before, limit, most = set(held), size, most if held else size
            else:
                with pytest.raises(LimitsError):
                    state.begin_capture(size)
        elif name == "make":
            if size in held or (before is not None and size <= limit):
                graph = state.graph(GraphShape(size, size, 1))
                metadata = builder.build(graph.dummy_batch(builder), graph=graph)
                assert metadata.batch.seq_lens.shape == (size,)
                held.add(size)
            else:
                with pytest.raises(LimitsError):
                    state.graph(GraphShape(size, size, 1))
        elif name == "release":
            state.release_graphs()
            held = set()
        else:
            state.end_capture() if name == "end" else state.abort_capture()
            if name == "abort" and before is not None:
                held &= before
            before = None
        assert {key.num_reqs for key in state.graphs} == held
