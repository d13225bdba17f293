"""CUDA graphs: one wrapper that is planned again, padding that reads the null block, memory that never moves."""

from __future__ import annotations

import gc

import pytest
import torch

from attnplug.contract import GraphShape, Layer
from attnplug.errors import LimitsError
from tests.backends.checks import check_advanced_replays
from tests.backends.harness import Harness, uncached

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


PLAIN = (Layer(name="layers.0"),)


def graphs(load_fake, layers=PLAIN, **required) -> Harness:
    return Harness(load_fake, layers, cudagraph="uniform_batch", **required)


def rows_of(harness: Harness, graph, monkeypatch, batch):
    """Build a batch for a graph, and return the rows that were planned."""
    from attnplug_flashinfer import kinds  # noqa: PLC0415 - requires the fake

    seen = []
    for kind in (kinds.Decode, kinds.Prefill):
        monkeypatch.setattr(kind, "replan", lambda self, wrapper, rows, buffers: seen.append(rows))
    harness.builder.build(batch, graph=graph)
    return seen[0]


def test_a_graph_has_one_wrapper_per_plan_key(load_fake, journal) -> None:
    harness = graphs(load_fake, [Layer(name=f"layers.{i}", scale=0.1 * (i + 1)) for i in range(2)])
    graph = harness.graph()
    for lens in ([20, 9, 40], [5], [64, 64, 64, 64]):
        harness.builder.build(harness.batch([1] * len(lens), lens), graph=graph)

    assert [call.owner for call in journal.of("__init__")] == [DECODE, DECODE]
    assert len(journal.plans) == 8
    assert len({call.wrapper for call in journal.of("plan")}) == 2


def test_the_plan_is_the_same_object_in_every_replay(load_fake) -> None:
    harness = graphs(load_fake)
    graph = harness.graph()
    plans = [
        harness.impls[0].wrapped.plan_of(harness.builder.build(harness.batch([1], [length]), graph=graph))
        for length in (5, 50)
    ]

    assert plans[0] is plans[1]


@pytest.mark.parametrize("query_len", [1, 3, 20])
def test_padded_requests_have_rows_and_no_key(load_fake, monkeypatch, query_len) -> None:
    harness = graphs(load_fake, decode_query_len=query_len)
    graph = harness.graph(4 if query_len < 20 else 3, query_len)
    rows = rows_of(harness, graph, monkeypatch, harness.batch([query_len, query_len], [40, 33]))
    padding = graph.key.num_reqs - 2

    assert rows.starts.tolist() == list(range(0, graph.key.num_tokens + 1, query_len))
    assert rows.indptr.tolist() == [0, 3, 6, *[6] * padding]
    assert rows.indices.tolist() == [1, 2, 3, 4, 5, 6]
    assert rows.last_page_len.tolist() == [8, 1, *[0] * padding]


def test_a_full_graph_has_no_padding(load_fake, monkeypatch) -> None:
    harness = graphs(load_fake)
    rows = rows_of(harness, harness.graph(2), monkeypatch, harness.batch([1, 1], [16, 17]))

    assert rows.indptr.tolist() == [0, 1, 3]
    assert rows.last_page_len.tolist() == [16, 1]


def test_stale_lengths_of_padded_requests_are_not_read(load_fake, monkeypatch) -> None:
    harness = graphs(load_fake)
    rows = rows_of(harness, harness.graph(3), monkeypatch, harness.batch([1, 0], [16, 40]))

    assert rows.indptr.tolist() == [0, 1, 1, 1]
    assert rows.indices.tolist() == [1]


def test_decodes_of_several_rows_are_captured_as_prefills(load_fake, journal) -> None:
    harness = graphs(load_fake, decode_query_len=3)
    harness.graph(4, 3)

    (made,) = journal.of("__init__")
    assert made.owner == PREFILL
    assert made.arguments["use_cuda_graph"] is True
    assert journal.plans[0].arguments["causal"] is True


def test_captured_prefills_run_the_split_kv_kernels(load_fake, journal) -> None:
    Harness(load_fake, variant="fa3", cudagraph="uniform_batch", decode_query_len=3).graph(4, 3)

    assert [call.arguments["backend"] for call in journal.of("__init__")] == ["fa2"]


def test_decodes_with_sinks_are_captured_in_their_wrapper(load_fake, journal) -> None:
    harness = graphs(load_fake, [Layer(name="layers.0", sinks=torch.zeros(4))], sinks=True)
    harness.graph()

    assert [call.owner for call in journal.plans] == ["BatchAttentionWithAttentionSinkWrapper"]


def test_tensor_cores_use_the_fast_plan_after_the_first(load_fake, journal) -> None:
    harness = graphs(load_fake, num_q_heads=16)
    graph = harness.graph()
    harness.builder.build(harness.batch([1, 1], [20, 30]), graph=graph)

    assert [call.kind for call in journal.plans] == ["plan", "fast_decode_plan"]


def test_without_a_fast_plan_the_plain_one_is_repeated(load_fake, journal, monkeypatch) -> None:
    harness = graphs(load_fake, num_q_heads=16)
    from attnplug_flashinfer import library  # noqa: PLC0415 - requires the fake

    monkeypatch.setattr(library, "_fast_decode_plan", None)
    graph = harness.graph()
    harness.builder.build(harness.batch([1, 1], [20, 30]), graph=graph)

    assert [call.kind for call in journal.plans] == ["plan", "plan"]


def test_fast_and_plain_plans_are_bitwise_equal(load_fake, monkeypatch) -> None:
    harness = graphs(load_fake, num_q_heads=16)
    graph, outputs = harness.graph(2), []
    from attnplug_flashinfer import library  # noqa: PLC0415 - requires the fake

    for _ in range(2):
        outputs.append(harness.forward(harness.builder.build(harness.batch([1, 1], [20, 30]), graph=graph)))
        monkeypatch.setattr(library, "_fast_decode_plan", None)
        harness.builder.build(harness.batch([1], [3]), graph=graph)

    assert torch.equal(*outputs)


def test_graphs_share_the_memory_of_the_pages(load_fake) -> None:
    harness = graphs(load_fake)
    large = harness.graph(4)
    with harness.state.graph_capture(4):
        small = harness.state.graph(GraphShape(2, 2, 1, 64))
        harness.builder.build(small.dummy_batch(harness.builder), graph=small)
    first, second = (harness.builder.wrapped.per_graph(graph, "buffers", lambda: None)[0] for graph in (large, small))

    assert first.indices is second.indices
    assert first.indptr is not second.indptr


def test_released_graphs_free_the_memory_of_the_pages(load_fake) -> None:
    harness = graphs(load_fake)
    harness.graph(4)
    assert harness.builder.wrapped._indices() is not None

    harness.state.release_graphs()
    gc.collect()

    assert harness.builder.wrapped._indices() is None


def test_a_larger_graph_allocates_its_memory(load_fake) -> None:
    harness = graphs(load_fake)
    with harness.state.graph_capture(4):
        made = [harness.state.graph(GraphShape(size, size, 1, 64)) for size in (2, 4)]
        for graph in made:
            harness.builder.build(graph.dummy_batch(harness.builder), graph=graph)
    first, second = (harness.builder.wrapped.per_graph(graph, "buffers", lambda: None)[0] for graph in made)

    assert first.indices.shape[0] < second.indices.shape[0]


@pytest.mark.parametrize("max_seq_len", [64, 50])
def test_a_graph_has_memory_for_the_longest_sequences(load_fake, max_seq_len) -> None:
    harness = graphs(load_fake)
    with harness.state.graph_capture(3):
        graph = harness.state.graph(GraphShape(3, 3, 1, max_seq_len))
        harness.builder.build(graph.dummy_batch(harness.builder), graph=graph)
    buffers, _ = harness.builder.wrapped.per_graph(graph, "buffers", lambda: None)
    harness.forward(harness.builder.build(harness.batch([1] * 3, [max_seq_len] * 3), graph=graph))

    assert buffers.indices.shape == (3 * 4,)


@pytest.mark.parametrize("variant", ["fa2", "fa3"])
@pytest.mark.parametrize("required", [{"num_q_heads": 4}, {"num_q_heads": 16}, {"sinks": True}], ids=str)
def test_a_graph_is_advanced_into_new_pages(load_fake, variant, required) -> None:
    check_advanced_replays(load_fake, variant, **required, head_size=64)


def test_all_wrappers_of_a_state_share_its_workspace(load_fake, monkeypatch) -> None:
    from attnplug_flashinfer import library  # noqa: PLC0415 - requires the fake

    seen = []
    for name in ("decode_wrapper", "prefill_wrapper"):
        make = getattr(library, name)
        monkeypatch.setattr(
            library,
            name,
            lambda workspace, *args, make=make, **more: seen.append(workspace) or make(workspace, *args, **more),
        )
    layers = [Layer(name=f"layers.{i}", scale=0.1 * (i + 1)) for i in range(2)]
    harness = graphs(load_fake, layers, cascade=True)
    harness.graph()
    harness.builder.build(harness.batch([1, 5], [9, 5]))

    assert len(seen) == 6  # two plan keys, with a graph, decodes and prefills each
    assert all(workspace is harness.state.workspace for workspace in seen)


def test_a_graph_can_be_advanced(load_fake) -> None:
    harness = graphs(load_fake)
    graph = harness.graph(2)
    metadata = harness.builder.build(harness.batch([1, 1], [15, 9]), graph=graph)
    advanced = harness.builder.advance_step(metadata)

    assert harness.impls[0].wrapped.plan_of(advanced) is harness.impls[0].wrapped.plan_of(metadata)
    assert advanced.batch.seq_lens_cpu.tolist() == [16, 10]


def test_shared_prefixes_and_prefills_run_eagerly(load_fake) -> None:
    harness = graphs(load_fake, cascade=True)
    batch = harness.batch([1, 1], [40, 36])
    shared = type(batch)(**{**batch.to_dict(), "common_prefix_len": 32})

    assert harness.builder.can_run_in_cudagraph(batch)
    assert not harness.builder.can_run_in_cudagraph(shared)
    assert not harness.builder.can_run_in_cudagraph(harness.batch([1, 5], [9, 5]))


def test_windowed_and_full_layers_share_a_state(load_fake) -> None:
    """One step plans both agreements in one set of graph buffers, each with its wrapper and its pages."""
    full, windowed = graphs(load_fake), graphs(load_fake, num_q_heads=8, sliding_window=16)
    needed = [each.backend.workspace_bytes(full.limits) for each in (full, windowed)]
    state = windowed.state = full.state
    windowed.builder = windowed.backend.make_builder(windowed.impls, state)
    assert state.workspace.numel() == max(needed)
    both = (full, windowed)
    with state.graph_capture(4):
        graph = state.graph(GraphShape(4, 4, 1, 64))
        captured = [each.builder.build(graph.dummy_batch(each.builder), graph=graph) for each in both]

    for lens in ([40, 33, 5], [64], [17, 18, 19, 20]):
        batches = {each.builder: each.batch([1] * len(lens), lens) for each in both}
        assert state.begin_forward(batches).graph is graph
        for each, metadata in zip(both, captured, strict=True):
            eager = each.forward(each.builder.build(uncached(batches[each.builder])))
            rows = len(lens) * each.backend.agreement.requirements.num_q_heads
            assert eager.numel() == rows * 64
            replayed = replay_rows(each, metadata, len(lens))
            torch.testing.assert_close(replayed, eager)


def replay_rows(harness: Harness, metadata, count: int):
    """Return the rows of a captured step, run on the rows that an eager step of `count` tokens draws."""
    requirements, generator = harness.backend.agreement.requirements, torch.Generator().manual_seed(3)
    given = [
        torch.randn(count, heads, 64, generator=generator).bfloat16()
        for heads in (requirements.num_q_heads, requirements.num_kv_heads, requirements.num_kv_heads)
    ]
    padded = [torch.cat((rows, rows.new_zeros(4 - count, *rows.shape[1:]))) for rows in given]
    output = padded[0].new_empty(4, harness.impls[0].output_width)
    harness.impls[0].forward(*padded, harness.backend.make_cache(64), metadata, output)
    return output[:count]


def test_a_workspace_grows_before_graphs_only(load_fake) -> None:
    small, large = graphs(load_fake), graphs(load_fake, num_q_heads=64, num_kv_heads=1, head_size=256)
    sizes = [each.backend.workspace_bytes(small.limits) for each in (small, large)]
    assert sizes[0] < sizes[1]
    state = small.state
    graph = small.graph()
    with pytest.raises(LimitsError, match="which graphs hold"):
        large.backend.make_builder(large.impls, state)
    small.builder.build(small.batch([1], [5]), graph=graph)

    state.release_graphs()
    large.backend.make_builder(large.impls, state)
    assert state.workspace.numel() == sizes[1]
    small.forward(small.builder.build(small.batch([1, 1], [9, 20])))
