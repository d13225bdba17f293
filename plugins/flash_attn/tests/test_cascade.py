"""Attention with a shared prefix in one pass equals attention over each full request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import Batch, KVCache, Layer
from attnplug_kit.oracle import assert_close
from plugins.flash_attn.tests.recording_kernels import load
from tests.backends.caches import copy_of, random_cache
from tests.backends.harness import BLOCK, Harness

KINDS = ["pages", "cumulative", "packed", "padded", "scheduled"]
SINKS = torch.linspace(-1.0, 3.0, 4)
REQUIRED: dict[str, Any] = {"cascade": True, "dtype": "float32", "return_lse": True}


def shared_batch(harness: Harness, query_lens: list[int], own: list[int], blocks: int, **more: Any) -> Batch:
    """Return a batch whose requests share their first blocks, with so many further keys before their queries."""
    length = blocks * BLOCK
    seq_lens = [query and query + more + length for query, more in zip(query_lens, own, strict=True)]
    batch = harness.batch(query_lens, seq_lens, first_block=1 + blocks)
    table = batch.block_table.clone()
    table[torch.tensor(query_lens) > 0, :blocks] = torch.arange(1, 1 + blocks, dtype=torch.int32)
    places = [
        int(table[request, place // BLOCK]) * BLOCK + place % BLOCK
        for request, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for place in range(length - query, length)
    ]
    given = {"block_table": table, "block_table_cpu": table, "slot_mapping": torch.tensor(places)}
    return evolve(batch, **given, slot_mapping_cpu=given["slot_mapping"], common_prefix_len=blocks * BLOCK, **more)


def results(harness: Harness, batch: Batch, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, generator = batch.num_actual_tokens, torch.Generator().manual_seed(5)
    query = torch.randn(tokens, 4, 64, generator=generator)
    key, value = (torch.randn(tokens, 2, 64, generator=generator) for _ in range(2))
    output, lse = torch.empty(tokens, 256), torch.empty(tokens, 4)
    copy = copy_of(harness.backend, cache)
    harness.impls[0].forward(query, key, value, copy, harness.builder.build(batch), output, lse=lse)
    return output, lse


@given(
    query_lens=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    prompts=st.lists(st.integers(4, 20), max_size=2),
    padding=st.sampled_from([None, 0, -1]),
    own=st.integers(0, 30),
    blocks=st.integers(1, 3),
    with_sinks=st.booleans(),
    cap=st.sampled_from([None, 5.0]),
    kind=st.sampled_from(KINDS),
)
def test_cascade_equals_flat_attention(query_lens, prompts, padding, own, blocks, with_sinks, cap, kind) -> None:
    lens = [*query_lens, *prompts]
    if padding is not None:  # a padded request has other pages, and may be the first
        lens.insert(0 if padding == 0 else len(lens), 0)
    layer = Layer(name="layers.0", sinks=SINKS if with_sinks else None)
    harness = Harness(load, [layer], kind, **REQUIRED, sinks=with_sinks, decode_query_len=3, logits_soft_cap=cap)
    batch = shared_batch(harness, lens, [own + request for request in range(len(lens))], blocks)
    cache = random_cache(harness.backend, 64)

    (output, lse), (flat, flat_lse) = (
        results(harness, each, cache) for each in (batch, evolve(batch, common_prefix_len=0))
    )
    assert_close(output, flat.double(), dtype=torch.float32, scale=4.0)
    assert_close(lse, flat_lse.double(), dtype=torch.float32, what="lse")


def test_the_prefix_is_one_non_causal_request_of_all_rows() -> None:
    harness = Harness(load, [Layer(name="layers.0", sinks=SINKS)], "scheduled", **REQUIRED, sinks=True)
    batch = shared_batch(harness, [1, 1, 5], [3, 0, 20], 2)
    plan = harness.impls[0].wrapped.plan_of(harness.builder.build(batch))

    call = plan.prefix.call
    assert (plan.prefix.first, plan.prefix.last, call.causal) == (0, 7, False)
    assert (call.cu_seqlens_q.tolist(), call.seqused_k.tolist()) == ([0, 7], [32])
    assert (call.max_seqlen_q, call.max_seqlen_k, call.block_table.tolist()) == (7, 32, [[1, 2]])
    assert [part.call.seqused_k.tolist() for part in plan.parts] == [[4, 1], [25]]
    assert [part.call.max_seqlen_k for part in plan.parts] == [4, 25]
    assert torch.equal(plan.decode.call.block_table, batch.block_table[:2, 2:])
    assert all(part.call.causal for part in plan.parts)
    assert len(harness.backend.wrapped.kernels.scheduled) == 3  # the prefix, the decodes and the prefills


def test_the_sink_is_in_the_prefix_only() -> None:
    harness = Harness(load, [Layer(name="layers.0", sinks=SINKS)], **REQUIRED, sinks=True)
    results(harness, shared_batch(harness, [1, 5], [3, 20], 1), harness.backend.make_cache(64))

    *parts, prefix = harness.backend.wrapped.kernels.calls
    assert [recorded.params.sinks for recorded in parts] == [None, None]
    assert torch.equal(prefix.params.sinks, SINKS)


def test_the_prefix_is_read_through_the_pages_of_a_request_that_runs() -> None:
    harness = Harness(load, **REQUIRED)
    plan = harness.impls[0].wrapped.plan_of(harness.builder.build(shared_batch(harness, [0, 0, 1, 1], [0, 0, 4, 5], 2)))

    assert plan.prefix.call.block_table.tolist() == [[1, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_another_block_table_is_followed_by_the_prefix_too(kind) -> None:
    harness = Harness(load, variant=kind, **REQUIRED)
    batch = shared_batch(harness, [1, 1], [3, 9], 2)
    before = harness.builder.build(batch)
    table = torch.where(batch.block_table > 0, batch.block_table + 7, 0)
    after = harness.builder.update_block_table(before, table, batch.slot_mapping + 7 * BLOCK)

    prefix, earlier = (harness.impls[0].wrapped.plan_of(metadata).prefix for metadata in (after, before))
    if kind == "packed":
        assert torch.equal(prefix.slots, earlier.slots + 7 * BLOCK)
    else:
        assert prefix.call.block_table.tolist() == [[8, 9]]
    assert prefix.call.scheduler_metadata is earlier.call.scheduler_metadata


def test_cascade_attention_is_recommended_where_it_is_faster() -> None:
    builder = Harness(load, **REQUIRED).builder
    assert builder.use_cascade_attention(8192, [2] * 64)
    assert not builder.use_cascade_attention(128, [2] * 64)
    assert not Harness(load).builder.use_cascade_attention(8192, [2] * 64)


def test_strided_outputs_are_merged_in_place() -> None:
    harness = Harness(load, **REQUIRED)
    batch = shared_batch(harness, [1, 1], [3, 9], 1)
    cache = harness.backend.make_cache(64)
    wide = torch.full((3, 512), 7.0)
    query, keys = torch.randn(3, 4, 64), torch.randn(3, 2, 64)
    plain = torch.full((3, 256), 7.0)
    for output in (wide[:, 256:], plain):
        copy = copy_of(harness.backend, cache)
        harness.impls[0].forward(query, keys, keys, copy, harness.builder.build(batch), output)

    assert torch.equal(wide[:2, 256:], plain[:2])
    assert bool((wide[:, :256] == 7.0).all())
    assert bool((wide[2] == 7.0).all())
    assert bool((plain[2] == 7.0).all())
