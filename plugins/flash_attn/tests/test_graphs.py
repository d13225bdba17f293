"""Tensors in graph buffers keep their addresses, step after step, for each form of key lengths that libraries take."""

from __future__ import annotations

import pytest
import torch

from attnplug.contract import GraphShape
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
    (part,) = harness.impls[0].plan_of(captured).parts  # a graph runs this one for ever

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
        plan = harness.impls[0].plan_of(harness.builder.build(graph.dummy_batch(harness.builder), graph=graph))

    assert plan.decode is None
    assert not plan.prefill.reads_new_kv  # the steps to come may be others
    assert (plan.prefill.call.max_seqlen_q, plan.prefill.call.max_seqlen_k) == (16, graph.max_seq_len)
