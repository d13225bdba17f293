"""Graph buffers: what a captured graph reads stays where it is, and holds the step's values."""

from __future__ import annotations

import gc
import operator
import weakref

import attrs
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.batching import num_local_tokens_per_dcp_rank, positions_of
from attnplug.contract import Batch, GraphShape, Metadata, MetadataBuilder, Parallel
from attnplug.contract.graphs.repeat import repeat_of
from attnplug.contract.inputs.exact import AS_GIVEN, exact_batch
from attnplug.errors import BatchError, ContractError, LimitsError, NotNegotiatedError, PluginContractError, TensorError
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import (
    NUM_BLOCKS,
    copy_of,
    is_clear,
    limits,
    make_backend,
    make_batch,
    make_builder,
    make_layer,
    make_qkv,
    page_out,
    random_cache,
    refused,
    same,
)
from tests.examples import examples


class Capturing(MetadataBuilder):
    """Has nothing but the batch, whose tensors the core keeps in place."""

    supports_graphs = True


class CapturingBackend(ToyBackend):
    builder_class = Capturing


def world(level="always", cls=CapturingBackend, **requested):
    """Return a backend, a layer, and its builder."""
    backend = make_backend(cls, agreed_graphs=level, **requested)
    impl = make_layer(backend)
    return backend, impl, make_builder(backend, impl)


def capture(builder, *keys, **how):
    with builder.state.graph_capture(builder.limits.max_num_reqs):
        graphs = [builder.state.graph(key, **how) for key in keys]
        return graphs, [builder.build(graph.dummy_batch(), graph=graph) for graph in graphs]


def run(impl, metadata, query, key, value, pages):
    """Run a call over a copy of the pages; return output and pages."""
    output, cache = torch.full((query.shape[0], impl.output_width), 7.0), copy_of(impl.backend, pages)
    impl.forward(query, key, value, cache, metadata, output)
    return output, cache


# --- replay -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=2, max_size=4), st.integers(0, 2))
def test_a_replay_computes_its_own_batch(steps, spare):
    """What was captured is called again, as a graph would: it sees what the last build wrote, and nothing else."""
    backend, impl, _ = world("single_token_decode")
    builder = make_builder(backend, impl, num_blocks=2 * NUM_BLOCKS)
    reqs = max(map(len, steps)) + spare
    (graph,), (captured,) = capture(builder, GraphShape(reqs, reqs, 1))
    pages = random_cache(backend, NUM_BLOCKS * 2)
    for lens in steps:
        batch = make_batch([1] * len(lens), lens)
        query, key, value, _ = make_qkv(backend, reqs)

        expected, written = run(impl, builder.build(batch), query, key, value, pages)
        builder.build(batch, graph=graph)
        output, cache = run(impl, captured, query, key, value, pages)

        count = len(lens)
        torch.testing.assert_close(output[:count], expected[:count])
        assert same(cache, written)


def test_padding_has_no_keys_and_no_slot():
    """It has a query: a kernel writes its rows, which no uninitialized memory is left in."""
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(4, 4, 1))
    builder.build(make_batch([1] * 4, [9, 9, 9, 9]), graph=graph)
    stale = make_batch([1, 1, 0], [5, 3, 7])  # the last request has ended, and its length and blocks were left

    seen = builder.build(stale, graph=graph).batch

    assert seen.query_start_loc.tolist() == seen.query_start_loc_cpu.tolist() == [0, 1, 2, 3, 4]
    assert seen.seq_lens.tolist() == seen.seq_lens_cpu.tolist() == [5, 3, 0, 0]
    assert seen.slot_mapping[2:].tolist() == [-1, -1]
    assert stale.block_table[2:].any()
    assert not seen.block_table[2:].any()
    assert positions_of(seen).tolist() == [4, 2, 0, 0]
    assert (seen.num_reqs, seen.num_actual_tokens, seen.max_query_len, seen.max_seq_len) == (4, 4, 1, 64)


def test_mixed_batches_are_captured_whole():
    backend, impl, builder = world("always")
    (graph,), (captured,) = capture(builder, GraphShape(4, 16))
    batch = make_batch([1, 5, 3], [4, 9, 3])
    query, key, value, _ = make_qkv(backend, 16)
    pages = random_cache(backend, NUM_BLOCKS)

    expected, _ = run(impl, builder.build(batch), query, key, value, pages)
    builder.build(batch, graph=graph)
    output, _ = run(impl, captured, query, key, value, pages)

    torch.testing.assert_close(output[:9], expected[:9])
    assert (captured.num_decodes, captured.num_prefills, captured.num_prefill_tokens) == (0, 4, 16)


def test_graphs_of_one_builder_read_one_memory():
    _, _, builder = world()
    (small, large), (first, second) = capture(builder, GraphShape(2, 2, 1), GraphShape(8, 8, 1))

    assert first.batch.block_table.data_ptr() == second.batch.block_table.data_ptr()
    assert small is not large
    assert dict(builder.state.graphs) == {small.key: small, large.key: large}


def test_builders_have_separate_memory():
    backend, impl, builder = world()
    other = backend.make_builder([impl], builder.state)
    with builder.state.graph_capture(2):
        graph = builder.state.graph(GraphShape(2, 2, 1))
        mine, theirs = (each.build(graph.dummy_batch(), graph=graph) for each in (builder, other))

    builder.build(make_batch([1, 1], [8, 9]), graph=graph)

    assert mine.batch.seq_lens.tolist() == [8, 9]
    assert theirs.batch.seq_lens.tolist() == [2, 2]


def test_a_bad_batch_leaves_the_buffers_alone():
    _, _, builder = world()
    (graph,), (captured,) = capture(builder, GraphShape(2, 2, 1))
    builder.build(make_batch([1, 1], [8, 9]), graph=graph)
    bad = make_batch([1, 1], [5, 6])
    bad.slot_mapping[0] = 3

    with pytest.raises(Exception, match="slot"):
        builder.build(bad, graph=graph)
    with pytest.raises(BatchError):
        builder.build(make_batch([1] * 3, [2] * 3), graph=graph)

    assert captured.batch.seq_lens.tolist() == [8, 9]


# --- inputs of the host -------------------------------------------------------------------------------------------


def test_a_host_may_own_the_inputs():
    _, _, builder = world()
    batch = make_batch([1, 1], [5, 3], width=16)
    table = page_out([1, 1], [5, 3])[0]
    with builder.state.graph_capture(2):
        graph = builder.state.graph(GraphShape(2, 2, 1), host_owned_inputs=True)
        metadata = builder.build(batch, graph=graph)

    assert metadata.batch.block_table is batch.block_table
    batch.seq_lens.copy_(torch.tensor([4, 3]))
    batch.slot_mapping.copy_(torch.tensor([7, 14]))
    builder.build(evolve(batch, max_seq_len=4), graph=graph)

    with refused(BatchError, problem="block_table", expected="captured with", fix="host_owned_inputs=False"):
        builder.build(evolve(batch, block_table=table, block_table_cpu=table, max_seq_len=4), graph=graph)


def test_a_host_pads_the_inputs_that_it_owns():
    _, _, builder = world()
    with builder.state.graph_capture(4):
        graph = builder.state.graph(GraphShape(4, 4, 1), host_owned_inputs=True)
        with refused(BatchError, problem="num_reqs=2", expected="the host pads"):
            builder.build(make_batch([1, 1], [5, 3]), graph=graph)


def in_place(*, running=3):
    """Return a builder with a captured graph of the host's own inputs on a device, and a step of so many requests."""
    _, _, builder = world("single_token_decode", device="meta", seq_lens_cpu_kind="upper_bound")
    lens = [6, 5, 9][:running] + [0] * (3 - running)
    step = make_batch([1] * running + [0] * (3 - running), lens, width=16, device="meta")
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    fields = {"num_actual_tokens": 3, "max_seq_len": 20, "slot_mapping": slots}
    step = evolve(step, block_table_cpu=None, slot_mapping_cpu=None, **fields)
    with builder.state.graph_capture(3):
        graph = builder.state.graph(GraphShape(3, 3, 1), host_owned_inputs=True)
        builder.build(evolve(step, dummy=True), graph=graph)
    return builder, graph, step


@pytest.mark.parametrize("running", [1, 3])
def test_a_step_like_the_one_before_is_not_checked_from_the_start(monkeypatch, running):
    builder, graph, step = in_place(running=running)
    first = builder.build(step, graph=graph)
    monkeypatch.setattr(builder._guard, "check", None)
    lens = torch.tensor([20, 1, 7], dtype=torch.int32)
    lens[running:] = 0

    second = builder.build(evolve(step, seq_lens_cpu=lens, max_seq_len=21), graph=graph)

    assert second.batch.seq_lens_cpu is lens
    assert graph.is_outdated(first)
    assert not graph.is_outdated(second)
    for field in attrs.fields(type(first)):
        if field.name not in {"batch", "plans"}:
            assert getattr(second, field.name) == getattr(first, field.name), field.name
    for field in attrs.fields(Batch):
        if field.name not in {"seq_lens_cpu", "derived"}:
            before, after = getattr(first.batch, field.name), getattr(second.batch, field.name)
            is_same = torch.equal if isinstance(before, torch.Tensor) and before.is_cpu else operator.is_
            assert is_same(before, after) or before == after, field.name


CHANGES = {
    "nothing": {},
    "a sequence is longer than the longest": {"seq_lens_cpu": torch.tensor([6, 21, 9], dtype=torch.int32)},
    "a sequence is shorter than its query": {"seq_lens_cpu": torch.tensor([6, 0, 9], dtype=torch.int32)},
    "a length is negative": {"seq_lens_cpu": torch.tensor([6, 5, -1], dtype=torch.int32)},
    "lengths of int64": {"seq_lens_cpu": torch.tensor([6, 5, 9])},
    "too few lengths": {"seq_lens_cpu": torch.tensor([6, 5], dtype=torch.int32)},
    "lengths on a device": {"seq_lens_cpu": torch.empty(3, dtype=torch.int32, device="meta")},
    "no lengths": {"seq_lens_cpu": None},
    "the longest is more than the limit": {"max_seq_len": 65},
    "the longest is no int": {"max_seq_len": 20.0},
    "the longest is less than a sequence": {"max_seq_len": 8},
    "other starts": {"query_start_loc_cpu": torch.tensor([0, 1, 2, 2], dtype=torch.int32)},
    "starts that fall": {"query_start_loc_cpu": torch.tensor([0, 2, 1, 3], dtype=torch.int32)},
    "no starts": {"query_start_loc_cpu": None},
    "starts of int64": {"query_start_loc_cpu": torch.arange(4)},
    "fewer tokens": {"num_actual_tokens": 2},
    "more tokens": {"num_actual_tokens": 4},
    "fewer requests": {"num_reqs": 2},
    "a longer query": {"max_query_len": 2},
    "not causal": {"causal": False},
    "a dummy": {"dummy": True},
    "a shared prefix": {"common_prefix_len": 4},
    "padded requests": {"num_padded_reqs": 1},
    "computed tokens": {"num_computed_tokens_cpu": torch.tensor([9, 9, 9], dtype=torch.int32)},
    "blocks": {"block_table_cpu": torch.full((3, 16), 99, dtype=torch.int32)},
    "slots": {"slot_mapping_cpu": torch.full((3,), 4)},
    "a table that is too narrow": {"block_table": torch.empty(3, 4, dtype=torch.int32, device="meta")},
    "a table of other strides": {"block_table": torch.empty(16, 3, dtype=torch.int32, device="meta").T},
    "no table": {"block_table": None},
    "lengths of another dtype": {"seq_lens": torch.empty(3, dtype=torch.int64, device="meta")},
    "more slots": {"slot_mapping": torch.empty(4, dtype=torch.int64, device="meta")},
    "a mask": {"custom_mask": torch.ones(20, dtype=torch.bool, device="meta")},
    "a feature": {"extra": {"colour": 1}},
    "encoders": {"encoder_seq_lens": torch.empty(3, dtype=torch.int32, device="meta")},
}


TAKEN = {"nothing", "no lengths", "other starts", "a dummy", "padded requests", "a longer query", "blocks"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_another_is_refused_as_the_first_one_is(change):
    builder, graph, step = in_place()
    builder.build(step, graph=graph)
    other = evolve(step, **CHANGES[change])
    wanted = outcome(builder, graph, other, anew=True)

    assert outcome(builder, graph, other) == wanted
    assert (wanted is None) == (change in TAKEN)


def outcome(builder, graph, batch, *, anew=False):
    """Return the error of a build, or None; all checks are made again where it is anew."""
    kept = graph._kept.pop(("repeat", builder)) if anew else None
    try:
        builder.build(batch, graph=graph)
    except (ContractError, TypeError, RuntimeError) as error:
        return type(error), str(error)
    finally:
        if anew:
            graph._kept["repeat", builder] = kept
    return None


def test_a_step_in_other_memory_is_checked_again():
    _, _, step = in_place()
    lengths = exact_batch(step, AS_GIVEN)[1]
    repeat = repeat_of(step, lengths, None, most_keys=64, block_size=4)
    assert repeat.takes(step)
    moved = evolve(step, seq_lens=torch.zeros(3, dtype=torch.int32))
    assert not repeat.takes(moved)
    assert repeat_of(moved, lengths, None, most_keys=64, block_size=4) is None


# --- which graph ---------------------------------------------------------------------------------------------------


def test_the_smallest_graph_is_found():
    _, _, builder = world("uniform_batch", decode_query_len=4)
    keys = [GraphShape(8, 8, 1), GraphShape(2, 2, 1), GraphShape(4, 4, 1, 32), GraphShape(4, 16, 4)]
    capture(builder, *keys)

    def found(query_lens, seq_lens):
        step = builder.state.begin_forward({builder: make_batch(query_lens, seq_lens)})
        assert step.metadata[builder].graph is step.graph
        return step.graph and step.graph.key

    assert found([1], [3]) == keys[1]
    assert found([1] * 3, [8] * 3) == keys[2]
    assert found([1] * 3, [33, 2, 2]) == keys[0]
    assert found([4] * 3, [8] * 3) == keys[3]
    assert found([3] * 3, [8] * 3) is None  # no shape of that query length
    assert found([1, 2], [8] * 2) is None  # not uniform
    assert found([1, 9], [8, 9]) is None  # a prefill
    assert found([1] * 9, [2] * 9) is None  # too many


SHAPES = (
    GraphShape(2, 2, 1), GraphShape(3, 3, 1, 8), GraphShape(4, 4, 1), GraphShape(6, 6, 1, 16), GraphShape(8, 8, 1),
    GraphShape(2, 4, 2), GraphShape(4, 8, 2, 16), GraphShape(4, 12), GraphShape(8, 24),
)  # fmt: skip


def as_host(batch, padded, more):
    """Return a batch with padded requests that repeat the first, and bounds that are so much larger."""
    fields = {}
    length = int(batch.query_start_loc[1])
    for name in ("seq_lens", "block_table"):
        rows = getattr(batch, name)
        fields[name] = fields[f"{name}_cpu"] = torch.cat([rows, *[rows[:1]] * padded])
    starts = batch.query_start_loc
    ends = starts[-1] + torch.arange(1, padded + 1) * length
    fields["query_start_loc"] = fields["query_start_loc_cpu"] = torch.cat([starts, ends]).int()
    tokens = batch.num_actual_tokens + padded * length + more
    slots = torch.full((tokens,), -1)
    slots[: batch.num_actual_tokens] = batch.slot_mapping
    return evolve(
        batch,
        **fields,
        slot_mapping=slots,
        slot_mapping_cpu=slots,
        num_reqs=batch.num_reqs + padded,
        num_padded_reqs=padded,
        num_actual_tokens=tokens,
        max_query_len=batch.max_query_len + more,
        max_seq_len=batch.max_seq_len + more,
    )


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=6) | st.integers(1, 9).map(lambda n: [1] * n),
    st.integers(3, 17),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from(["uniform_batch", "always"]),
)
def test_bounds_and_padding_change_no_graph(query_lens, seq_len, padded, more, level):
    """It is the graph of the exact batch, or none; and what is built for it is the exact batch."""
    backend, impl, _ = world(level, decode_query_len=2)
    builder = make_builder(backend, impl, num_blocks=64)
    shapes = [shape for shape in SHAPES if level == "always" or shape.query_len is not None]
    capture(builder, *shapes)
    exact = make_batch(query_lens, [seq_len] * len(query_lens))
    lengths, longest = set(query_lens), max(query_lens)
    fitting = [
        shape
        for shape in shapes
        if shape.num_reqs >= len(query_lens)
        and shape.num_tokens >= sum(query_lens)
        and (shape.max_seq_len or 64) >= seq_len
        and (shape.query_len is None or lengths == {shape.query_len})
    ]
    expected = min(fitting, key=lambda shape: (shape.num_tokens, shape.num_reqs, shape.max_seq_len or 64), default=None)

    step = builder.state.begin_forward({builder: as_host(exact, padded, more)})

    found = None if step.graph is None else step.graph.key
    assert found == expected
    batch = step.metadata[builder].batch
    starts = batch.query_start_loc[: len(query_lens) + 1]
    assert starts.tolist() == exact.query_start_loc.tolist()
    behind = batch.query_start_loc[len(query_lens) :].tolist()
    more = 0 if found is None or found.query_len is None else found.query_len
    assert behind == [sum(query_lens) + more * count for count in range(len(behind))]
    assert batch.seq_lens.tolist()[: len(query_lens)] == [seq_len] * len(query_lens)
    assert not any(batch.seq_lens.tolist()[len(query_lens) :])
    assert found is not None or batch.max_query_len == longest


def test_bounds_whose_product_agrees_are_bounds():
    """Four tokens of four requests are no eight of four, though 4 * 2 is 8."""
    _, _, builder = world("uniform_batch", decode_query_len=2)
    (small, *_), _ = capture(builder, GraphShape(4, 4, 1), GraphShape(8, 8, 1))
    batch = make_batch([1] * 4, [3] * 4)
    slots = torch.cat([batch.slot_mapping, torch.full((4,), -1)])
    bounds = evolve(batch, slot_mapping=slots, slot_mapping_cpu=slots, num_actual_tokens=8, max_query_len=2)

    assert builder.state.find_graph({builder: bounds}) is small
    assert small.fits(bounds)


def test_captures_are_decided_by_the_exact_longest_sequence():
    picky = type("Picky", (Capturing,), {"can_capture": lambda _, batch: batch.max_seq_len < 5})
    _, _, builder = world(cls=type("B", (ToyBackend,), {"builder_class": picky}))
    capture(builder, GraphShape(2, 2, 1))
    found = builder.state.find_graph({builder: evolve(make_batch([1], [4]), max_seq_len=9)})
    assert found is not None
    assert builder.state.begin_forward({builder: evolve(make_batch([1], [4]), max_seq_len=9)}).graph is found


@pytest.mark.parametrize("padded", [-1, 2, 9, True, "1"])
def test_an_invalid_padding_is_refused_before_a_graph_is_found(padded):
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    batch = evolve(make_batch([1, 1], [5, 9]), num_padded_reqs=padded)
    with refused(BatchError, problem="num_padded_reqs"):
        builder.state.find_graph({builder: batch})
    with refused(BatchError, problem="num_padded_reqs"):
        graph.fits(batch)


def test_a_graph_of_the_hosts_own_inputs_takes_its_shape_alone():
    _, _, builder = world()
    keys = GraphShape(2, 2, 1), GraphShape(4, 4, 1)
    capture(builder, *keys, host_owned_inputs=True)
    padded = as_host(make_batch([1, 1], [5, 9]), 2, 0)
    found = builder.state.find_graph({builder: padded})
    assert found.key == keys[1]
    assert builder.state.find_graph({builder: make_batch([1, 1], [5, 9])}).key == keys[0]
    assert builder.state.find_graph({builder: as_host(make_batch([1, 1], [5, 9]), 1, 0)}) is None


@pytest.mark.parametrize(
    ("level", "covered"),
    [
        ("never", []),
        ("single_token_decode", [(1, 1)]),
        ("uniform_batch", [(1, 1), (3, 3)]),
        ("always", [(1, 1), (3, 3), (1, 3), (9, 9)]),
    ],
)
def test_levels_cover_batches(level, covered):
    _, _, builder = world(level, decode_query_len=4)
    shapes = [(1, 1), (3, 3), (1, 3), (9, 9)]
    batches = {shape: make_batch(list(shape), [9, 9]) for shape in shapes}
    assert [shape for shape in shapes if builder.can_run_in_cudagraph(batches[shape])] == covered
    assert builder.graph_level == level


def test_a_lower_level_of_the_host_counts():
    backend, impl, _ = world("always")
    builder = backend.make_builder([impl], backend.make_state(limits(cudagraph="single_token_decode")))
    assert builder.graph_level == "single_token_decode"
    assert not builder.can_run_in_cudagraph(make_batch([2], [3]))
    with builder.state.graph_capture(2), refused(LimitsError, problem="GraphShape", expected="'always'"):
        builder.state.graph(GraphShape(2, 4))


def test_a_plugin_may_exclude_batches():
    picky = type("Picky", (Capturing,), {"can_capture": lambda _, batch: batch.max_seq_len < 5})
    _, _, builder = world(cls=type("B", (ToyBackend,), {"builder_class": picky}))
    capture(builder, GraphShape(2, 2, 1))
    assert builder.state.find_graph({builder: make_batch([1], [4])}) is not None
    assert builder.state.find_graph({builder: make_batch([1], [5])}) is None


def test_a_host_may_name_the_graph():
    _, _, builder = world()
    keys = [GraphShape(2, 2, 1), GraphShape(8, 8, 1)]
    capture(builder, *keys)
    batches = {builder: make_batch([1], [4])}
    assert builder.state.begin_forward(batches).graph.key == keys[0]
    assert builder.state.begin_forward(batches, key=keys[1]).graph.key == keys[1]
    with refused(LimitsError, problem="GraphShape"):
        builder.state.begin_forward(batches, key=GraphShape(3, 3, 1))


def test_padding_within_runs_eagerly():
    """The rows of each request have a fixed place in a captured shape, whichever requests are padding."""
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(4, 4, 1))
    within, last = make_batch([1, 0, 1], [5, 0, 9]), make_batch([1, 1, 0], [5, 9, 0])

    assert builder.state.find_graph({builder: within}) is None
    assert builder.state.find_graph({builder: last}) is graph
    with refused(BatchError, problem="padded request before others", expected="come last", fix="graph=None"):
        builder.build(within, graph=graph)


@pytest.mark.parametrize("level", ["uniform_batch", "always"])
@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len"])
@pytest.mark.parametrize("value", [None, "2", 2.0])
def test_counts_are_python_ints_in_a_graph(level, name, value):
    _, _, builder = world(level)
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    batch = evolve(make_batch([1, 1], [5, 9]), **{name: value})

    assert builder.can_run_in_cudagraph(batch)
    with refused(BatchError, problem=f"{name}={value!r}", expected="Python int"):
        builder.build(batch, graph=graph)


def test_can_capture_gets_checked_batches():
    """Starts that are nowhere, and a batch that contradicts itself, are refused by the guard, in its words."""
    requested = []
    picky = type("Picky", (Capturing,), {"can_capture": lambda _, batch: requested.append(batch) or True})
    _, _, builder = world(cls=type("B", (ToyBackend,), {"builder_class": picky}))
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    requested.clear()
    true = make_batch([1, 1], [5, 9])
    for starts in (true.query_start_loc.to("meta"), true.query_start_loc[:0]):
        with refused(TensorError, problem="query_start_loc"):
            builder.build(evolve(true, query_start_loc_cpu=starts), graph=graph)
    with refused(BatchError, problem="max_seq_len=8"):
        builder.build(evolve(true, max_seq_len=8), graph=graph)

    assert not requested
    builder.build(true, graph=graph)
    assert requested == [true]


@pytest.mark.parametrize("num_reqs", [0, -1])
def test_fits_takes_batches_that_were_not_checked(num_reqs):
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    batch = evolve(make_batch([1], [5]), num_reqs=num_reqs)

    assert graph.fits(batch)
    with refused(BatchError, expected="at least one request"):
        builder.build(batch, graph=graph)


def test_extras_run_eagerly():
    backend = make_backend(CapturingBackend, agreed_graphs="always", features=("acme.rope",))
    builder = make_builder(backend)
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    batch = make_batch([1], [4], extra={"acme.rope": 1})
    assert builder.state.find_graph({builder: batch}) is None
    with refused(BatchError, problem="extra 'acme.rope'"):
        builder.build(batch, graph=graph)


def test_mixed_shapes_hold_no_mask():
    builder = make_builder(make_backend(CapturingBackend, agreed_graphs="always", custom_mask=True))
    batch = make_batch([1, 2], [3, 4], custom_mask=torch.ones(11, dtype=torch.bool))
    with builder.state.graph_capture(2):
        graph = builder.state.graph(GraphShape(2, 8))
        assert not graph.fits(batch)
        with refused(BatchError, problem="custom_mask", expected="one query length"):
            builder.build(batch, graph=graph)


def test_per_graph_keeps_for_one_builder():
    backend, impl, builder = world()
    other = backend.make_builder([impl], builder.state)
    with builder.state.graph_capture(2):
        graph = builder.state.graph(GraphShape(2, 2, 1))
    mine, theirs = (each.wrapped.per_graph(graph, "wrapper", object) for each in (builder, other))
    assert mine is not theirs
    assert builder.wrapped.per_graph(graph, "wrapper", object) is mine
    assert graph.share("shared", object) is graph.share("shared", object)


def test_only_what_was_captured_is_found():
    backend, impl, builder = world()
    capture(builder, GraphShape(2, 2, 1))
    late = backend.make_builder([impl], builder.state)
    assert builder.state.find_graph({late: make_batch([1], [4])}) is None


# --- capture ------------------------------------------------------------------------------------------------------


def test_graph_buffers_are_made_inside_a_capture():
    _, _, builder = world()
    state, key = builder.state, GraphShape(2, 2, 1)
    with refused(LimitsError, problem="GraphShape", expected="while a capture is active"):
        state.graph(key)
    (graph,), _ = capture(builder, key)
    assert state.graph(key) is graph
    with refused(LimitsError, problem="host_owned_inputs=True", expected="the other value"):
        state.graph(key, host_owned_inputs=True)


def test_a_failed_capture_leaves_no_buffers():
    _, _, builder = world()
    (before,), _ = capture(builder, GraphShape(2, 2, 1))

    def fail():
        with builder.state.graph_capture(16):
            builder.state.graph(GraphShape(4, 4, 1))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(builder.state.graphs.values()) == [before]
    capture(builder, GraphShape(4, 4, 1))


def test_after_a_failed_capture_larger_batches_may_be_captured():
    _, _, builder = world()

    def fail():
        with builder.state.graph_capture(2):
            graph = builder.state.graph(GraphShape(2, 2, 1))
            builder.build(graph.dummy_batch(), graph=graph)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    _, (metadata,) = capture(builder, GraphShape(8, 8, 1))
    assert metadata.batch.seq_lens.shape == (8,)


def test_what_was_captured_in_inference_mode_is_built_into_outside_of_it():
    _, _, builder = world()
    with torch.inference_mode():
        (graph,), (captured,) = capture(builder, GraphShape(2, 2, 1))
        kept = builder.wrapped.persist(graph, "starts", torch.arange(2))

    builder.build(make_batch([1], [5]), graph=graph)
    builder.wrapped.persist(graph, "starts", torch.arange(2) + 5)

    assert captured.batch.seq_lens.tolist() == [5, 0]
    assert kept.tolist() == [5, 6]


@pytest.mark.parametrize("size", [0, 17, True, 2.0])
def test_a_capture_is_within_the_limits(size):
    _, _, builder = world()
    with refused(LimitsError, problem="max_batch_size=", expected="max_num_reqs=16"), builder.state.graph_capture(size):
        pass


def test_one_capture_at_a_time():
    _, _, builder = world()
    with builder.state.graph_capture(4):
        with refused(LimitsError, problem="max_batch_size=4", expected="active"), builder.state.graph_capture(4):
            pass
        builder.state.graph(GraphShape(4, 4, 1))
    with refused(LimitsError, expected="made for 4"), builder.state.graph_capture(8):
        pass


def test_released_buffers_are_refused_and_freed():
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    gone = weakref.ref(graph)

    builder.state.release_graphs()

    with refused(BatchError, problem="GraphBuffers", expected="until they are released"):
        builder.build(make_batch([1], [2]), graph=graph)
    del graph, _
    gc.collect()
    assert gone() is None
    with builder.state.graph_capture(8):
        pass


def test_no_graphs_without_an_agreement():
    _, _, builder = world("never")
    with refused(NotNegotiatedError, problem="capture", fix="cudagraph"), builder.state.graph_capture(2):
        pass


def test_a_builder_without_graphs_refuses_buffers():
    _, _, taking = world()
    (graph,), _ = capture(taking, GraphShape(2, 2, 1))
    builder = make_builder(make_backend(agreed_graphs="always"))
    assert builder.graph_level == "never"
    with refused(NotNegotiatedError, problem="graph buffers", expected="supports no graphs", fix="graph=None"):
        builder.build(make_batch([1], [3]), graph=graph)


def test_graph_buffers_of_another_state_are_refused():
    backend, impl, builder = world()
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    other = make_builder(backend, impl)
    for wrong in (graph, "graph"):
        with refused(BatchError, problem="graph buffers", expected="belong to the state"):
            other.build(make_batch([1], [3]), graph=wrong)


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        (GraphShape(17, 17, 1), "max_batch_size=16"),
        (GraphShape(2, 65), "max_num_tokens=64"),
        (GraphShape(2, 2, 1, 65), "max_seq_len=64"),
    ],
)
def test_a_shape_is_within_the_limits(key, allowed):
    _, _, builder = world()
    with builder.state.graph_capture(16), refused(LimitsError, problem="GraphShape", expected=allowed):
        builder.state.graph(key)


def test_a_decode_shape_has_at_most_the_agreed_query_length():
    _, _, builder = world("uniform_batch", decode_query_len=2)
    with builder.state.graph_capture(16), refused(LimitsError, expected="decode_query_len=2"):
        builder.state.graph(GraphShape(2, 6, 3))


@pytest.mark.parametrize(
    "fields",
    [(0, 1), (1, 0), (2, 1), (2, 3, 1), (1, 1, 0), (1, 1, 1, 0), (1, 4, 4, 3), (True, 1), (1.0, 1), (1, 1, True)],
)
def test_impossible_shapes_are_refused(fields):
    with refused(LimitsError, problem="GraphShape"):
        GraphShape(*fields)


def test_shapes_name_their_level():
    assert [GraphShape(2, 2, 1).level, GraphShape(2, 4, 2).level, GraphShape(2, 4).level] == [
        "single_token_decode",
        "uniform_batch",
        "always",
    ]


@pytest.mark.parametrize(
    "requested",
    [{}, {"attn_type": "encoder_decoder"}, {"sliding_window": 3}, {"custom_mask": True}, {"mm_prefix": True}],
)
def test_the_dummy_batch_is_valid_and_writes_nothing(requested):
    backend, impl, builder = world("uniform_batch", decode_query_len=3, **requested)
    for key in (GraphShape(3, 3, 1), GraphShape(3, 9, 3), GraphShape(3, 9, 3, 3)):
        _, (metadata,) = capture(builder, key)
        assert not (metadata.batch.slot_mapping >= 0).any()
    if not requested:
        pages = backend.make_cache(2)
        query, key, value, _ = make_qkv(backend, 9)
        _, cache = run(impl, metadata, query, key, value, pages)
        assert is_clear(cache)


@pytest.mark.parametrize("paged", [True, False])
def test_the_dummy_batch_of_masked_layers_has_a_mask(paged):
    backend = make_backend(custom_mask=True, paged=paged)
    metadata = make_builder(backend).build(backend.dummy_batch(GraphShape(2, 5)))
    lens = metadata.batch.query_start_loc.diff() * metadata.batch.seq_lens
    assert metadata.batch.custom_mask.tolist() == [True] * int(lens.sum())


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_dummy_batch_of_spread_sequences_has_shares(ranks):
    backend = make_backend(CapturingBackend, agreed_graphs="always", dcp_size=ranks)
    state = backend.make_state(limits(), Parallel(dcp_size=ranks, dcp_rank=1))
    builder = backend.make_builder([make_layer(backend)], state)
    _, (metadata,) = capture(builder, GraphShape(3, 14))

    batch = metadata.batch
    assert batch.seq_lens.tolist() == [5, 6, 6]
    assert batch.dcp_local_seq_lens.tolist() == num_local_tokens_per_dcp_rank(batch.seq_lens, ranks, 0).tolist()


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_shape_may_be_as_long_as_the_limits(query_len):
    backend, impl, _ = world("uniform_batch", decode_query_len=3)
    builder = make_builder(backend, impl, max_seq_len=query_len)
    _, (metadata,) = capture(builder, GraphShape(2, 2 * query_len, query_len))
    assert metadata.batch.seq_lens.tolist() == [query_len] * 2


# --- what a graph freezes -----------------------------------------------------------------------------------------


@frozen(eq=False, kw_only=True)
class Rich(Metadata):
    number: object
    tensor: torch.Tensor
    nested: object


@frozen
class Part:
    buffer: torch.Tensor


def plugin(make):
    """Return a world whose builder returns Rich metadata of ``make(batch, graph)``."""

    class Builder(Capturing):
        def plan_batch(self, batch, split, *, fast, graph):
            return make(batch, graph)

    return world(cls=type("B", (ToyBackend,), {"builder_class": Builder, "metadata_class": Rich}))


def steady(batch, graph):
    buffer = graph.share("buffer", lambda: torch.zeros(8))
    buffer[: batch.num_reqs] = batch.seq_lens.float()
    tail = [graph.share("object", object), "text", None]
    return {"number": batch.num_reqs, "tensor": buffer, "nested": {"part": Part(buffer[2:]), "tail": tail}}


def test_metadata_of_the_buffers_is_accepted():
    _, _, builder = plugin(steady)
    (graph,), (captured,) = capture(builder, GraphShape(2, 2, 1))
    builder.build(make_batch([1, 1], [8, 9]), graph=graph)
    assert captured.tensor[:2].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("number", lambda batch, _: {"number": batch.seq_lens_cpu.tolist()[0]}),
        ("tensor", lambda batch, _: {"tensor": batch.seq_lens.float()}),
        ("tensor", lambda batch, graph: {"tensor": graph.share("buffer", object)[: int(batch.seq_lens_cpu[0])]}),
        ("nested", lambda _, __: {"nested": object()}),
        ("nested", lambda batch, _: {"nested": [1] * int(batch.seq_lens_cpu[0])}),
        ("nested", lambda _, __: {"nested": Part(torch.zeros(3))}),
    ],
)
def test_metadata_that_a_graph_would_not_see_is_refused(name, change):
    """A plugin that hands a new tensor or number to a replay would compute the step of the capture, silently."""
    keep = []  # memory that is freed may be given out again, at the same address

    def make(batch, graph):
        keep.append({**steady(batch, graph), **change(batch, graph)})
        return keep[-1]

    _, _, builder = plugin(make)
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    with pytest.raises(PluginContractError, match=rf"whose .*{name}.* changed since the capture"):
        builder.build(make_batch([1, 1], [4, 5]), graph=graph)


def test_graph_buffers_have_a_repr():
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    assert repr(graph) == f"GraphBuffers({graph.key}, of toy/plain)"
    assert attrs.asdict(graph.key)["num_reqs"] == 2


def test_tensors_of_a_step_persist_in_the_buffers():
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    first, second = torch.arange(3), torch.arange(3) + 5
    assert builder.wrapped.persist(None, "starts", first) is first
    kept = builder.wrapped.persist(graph, "starts", first)
    assert builder.wrapped.persist(graph, "starts", second) is kept
    assert kept.tolist() == second.tolist()


def test_a_builder_with_other_blocks_has_separate_columns():
    """Windowed and full layers of one backend share a state, and may have pages of different sizes."""
    backend, _, builder = world()
    small = make_backend(CapturingBackend, agreed_graphs="always", block_size=2)
    other = small.make_builder([make_layer(small)], builder.state)
    with builder.state.graph_capture(2):
        graph = builder.state.graph(GraphShape(2, 2, 1))
        metadata = other.build(graph.dummy_batch(other), graph=graph)
    assert metadata.batch.block_table.shape == (2, 32)
    batch = make_batch([1, 1], [9, 40], block_size=2)
    assert torch.equal(other.build(batch, graph=graph).batch.block_table[:, :20], batch.block_table)
    assert backend.agreement.block_size == 4


def test_a_batch_that_no_graph_covers_is_refused():
    picky = type("Picky", (Capturing,), {"can_capture": lambda _, batch: batch.max_seq_len < 5})
    _, _, builder = world(cls=type("B", (ToyBackend,), {"builder_class": picky}))
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    with refused(BatchError, problem="GraphShape", expected="'always'", fix="graph=None"):
        builder.build(make_batch([1], [5]), graph=graph)


def test_a_plan_that_changed_is_named_by_its_layer():
    class Counting(Capturing):
        builds = 0

        def plan_batch(self, batch, split, *, fast, graph):
            self.builds += 1
            return {"plans": {key: {"builds": self.builds} for key in self.plan_groups}}

    _, _, builder = world(cls=type("B", (ToyBackend,), {"builder_class": Counting}))
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))

    with refused(PluginContractError, problem="whose plan of layer 'layers.0'['builds'] changed since the capture"):
        builder.build(make_batch([1], [3]), graph=graph)
