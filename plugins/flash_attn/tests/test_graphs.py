"""Tensors in graph buffers keep their addresses, step after step, for each form of key lengths that libraries take."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import GraphShape, capture
from plugins.flash_attn.tests.recording_kernels import load
from tests.backends.harness import Harness

DECODES = ([[1, 1], [9, 20]], [[1, 1, 1, 1], [40, 2, 17, 16]], [[1], [60]])
MIXED = ([[1, 7], [9, 20]], [[16], [16]], [[1, 1, 1, 9], [40, 2, 17, 16]])


@pytest.mark.parametrize("kind", ["pages", "cumulative", "padded", "scheduled"])
@pytest.mark.parametrize(("key", "steps"), [(GraphShape(4, 4, 1), DECODES), (GraphShape(4, 16), MIXED)])
def test_replays_read_the_memory_of_the_capture(kind, key, steps) -> None:
    harness = Harness(load, variant=kind, cudagraph="always")
    with harness.state.graph_capture(4):
        graph = harness.state.graph(key)
        captured = harness.builder.build(graph.dummy_batch(harness.builder), graph=graph)
    (part,) = harness.impls[0].wrapped.plan_of(captured).parts  # a graph runs this one for ever

    for query_lens, seq_lens in steps:
        batch = harness.batch(query_lens, seq_lens)
        harness.builder.build(batch, graph=graph)  # which compares all that a graph reads with the capture
        lens = part.call.seqused_k.tolist()
        assert lens == seq_lens + [0] * (4 - len(seq_lens))
        assert (part.first, part.last) == (0, key.num_tokens)
        replayed = harness.forward(captured)[: sum(query_lens)]
        assert torch.equal(replayed, eager(harness, query_lens, seq_lens, key.num_tokens))


def eager(harness: Harness, query_lens: list[int], seq_lens: list[int], rows: int) -> torch.Tensor:
    """The rows of a replay, built by themselves: `forward` draws as many as its metadata has, from one seed."""
    impl, batch, generator = harness.impls[0], harness.batch(query_lens, seq_lens), torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(rows, heads, 64, generator=generator).bfloat16()[: sum(query_lens)] for heads in (4, 2, 2)
    )
    output = query.new_empty(sum(query_lens), impl.output_width)
    cache = harness.backend.make_cache(64)
    impl.forward(query, key, value, cache, harness.builder.build(batch), output)
    return output


@pytest.mark.parametrize("kind", ["pages", "cumulative", "padded", "scheduled"])
def test_mixed_batches_are_one_call_in_a_graph(kind) -> None:
    harness = Harness(load, variant=kind, cudagraph="always")
    with harness.state.graph_capture(4):
        graph = harness.state.graph(GraphShape(4, 16))
        plan = harness.impls[0].wrapped.plan_of(harness.builder.build(graph.dummy_batch(harness.builder), graph=graph))

    assert plan.decode is None
    assert not plan.prefill.reads_new_kv  # the steps to come may be others
    assert (plan.prefill.call.max_seqlen_q, plan.prefill.call.max_seqlen_k) == (16, graph.max_seq_len)


@pytest.mark.parametrize("kind", ["pages", "cumulative", "padded", "scheduled"])
@pytest.mark.parametrize("prepares", [True, False])
def test_graphs_prepare_themselves(kind, prepares) -> None:
    """A captured preparation computes on the device what a build computes otherwise."""
    harness = Harness(load, variant=kind, cudagraph="always")
    builder = harness.builder
    with harness.state.graph_capture(4):
        graph = harness.state.graph(GraphShape(4, 4, 1))
        captured = builder.build(graph.dummy_batch(builder), graph=graph)
        _, replay = capture(lambda: builder.prepare(captured) if prepares else None, torch.device("cpu"))

    for query_lens, seq_lens in DECODES:
        builder.build(harness.batch(query_lens, seq_lens), graph=graph)
        replay()
        found = harness.forward(captured)[: sum(query_lens)]
        assert torch.equal(found, eager(harness, query_lens, seq_lens, 4))


@pytest.mark.parametrize("kind", ["pages", "cumulative", "padded", "scheduled"])
def test_replays_without_a_build_read_the_lengths_of_the_device(kind) -> None:
    harness = Harness(load, variant=kind, cudagraph="always")
    builder = harness.builder
    assert builder.replays_without_build
    table = torch.arange(1, 17, dtype=torch.int32).view(2, 8)
    batch = harness.batch([1, 1], [60, 40])
    batch = evolve(
        batch, block_table=table, block_table_cpu=table, slot_mapping=torch.tensor([75, 167]), slot_mapping_cpu=None
    )
    with harness.state.graph_capture(2):
        graph = harness.state.graph(GraphShape(2, 2, 1), host_owned_inputs=True)
        captured = builder.build(batch, graph=graph)
        _, replay = capture(lambda: builder.prepare(captured), torch.device("cpu"))
    for lens in ([61, 2], [62, 3]):
        batch.seq_lens.copy_(torch.tensor(lens))
        replay()
        harness.forward(captured)  # which checks its cumulative lengths, and its schedule
        (part,) = harness.impls[0].wrapped.plan_of(captured).parts
        assert part.call.seqused_k.tolist() == lens


@pytest.mark.parametrize("kind", ["pages", "cumulative", "scheduled"])
def test_windowed_and_full_layers_share_a_state(kind) -> None:
    """One step builds for both agreements, in one set of graph buffers; each replay reads its own tensors."""
    full = Harness(load, variant=kind, cudagraph="always")
    windowed = Harness(load, variant=kind, cudagraph="always", sliding_window=16)
    windowed.state = full.state
    windowed.builder = windowed.backend.make_builder(windowed.impls, full.state)
    both = (full, windowed)
    with full.state.graph_capture(4):
        graph = full.state.graph(GraphShape(4, 4, 1))
        captured = [each.builder.build(graph.dummy_batch(each.builder), graph=graph) for each in both]

    for query_lens, seq_lens in DECODES:
        step = full.state.begin_forward({each.builder: each.batch(query_lens, seq_lens) for each in both})
        assert step.graph is graph
        for each, metadata in zip(both, captured, strict=True):
            found = each.forward(metadata)[: sum(query_lens)]
            assert torch.equal(found, eager(each, query_lens, seq_lens, 4))
    assert not torch.equal(full.forward(captured[0]), windowed.forward(captured[1]))
