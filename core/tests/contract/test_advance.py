"""Steps that the device takes by itself: every request decodes the token that was sampled for it."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.contract import DecodeInputs, GraphShape
from attnplug.errors import BatchError, NotNegotiatedError, TensorError
from core.tests.contract.test_graphs import capture, world
from core.tests.contract.world import (
    BLOCK_SIZE,
    copy_of,
    make_backend,
    make_batch,
    make_builder,
    make_layer,
    make_qkv,
    random_cache,
    refused,
    same,
)

WIDTH = 16


def tokens(rows, sampled):
    return DecodeInputs(torch.tensor(sampled), torch.full((rows,), 99), torch.full((rows,), 77))


@settings(max_examples=80, deadline=None)
@given(
    lens=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    padding=st.integers(0, 2),
    steps=st.integers(1, 6),
    dropped=st.integers(0, 4),
    in_graph=st.booleans(),
)
def test_steps_follow_each_other(lens, padding, steps, dropped, in_graph):
    """Against lists of numbers: lengths, positions, slots and inputs of every step."""
    _, _, builder = world("single_token_decode")
    rows = len(lens) + padding
    batch = make_batch([1] * len(lens) + [0] * padding, lens + [0] * padding, width=WIDTH)
    going = max(1, len(lens) - dropped)
    batch.block_table.copy_(torch.arange(1, rows * WIDTH + 1).view(rows, WIDTH) % 31 + 1)
    place = [
        int(batch.block_table[row, (n - 1) // BLOCK_SIZE]) * BLOCK_SIZE + (n - 1) % BLOCK_SIZE
        for row, n in enumerate(lens)
    ]
    batch.slot_mapping.copy_(torch.tensor(place))
    if len(set(place)) < len(place):
        return
    graph = capture(builder, GraphShape(rows, rows, 1))[0][0] if in_graph else None
    metadata = builder.build(batch, graph=graph)
    for step in range(1, steps + 1):
        inputs = tokens(rows, [1000 * step + row for row in range(rows)])
        expected = [n + step for n in lens[:going]]
        slots = [
            int(batch.block_table[row, (n - 1) // BLOCK_SIZE]) * BLOCK_SIZE + (n - 1) % BLOCK_SIZE
            for row, n in enumerate(expected)
        ]
        if len(set(slots)) < len(slots):
            return
        metadata = builder.advance_step(metadata, tokens=inputs, num_queries=going)

        seen = metadata.batch
        assert seen.seq_lens.tolist() == seen.seq_lens_cpu.tolist() == expected + [0] * (rows - going)
        assert seen.query_start_loc.tolist() == [row if in_graph else min(row, going) for row in range(rows + 1)]
        assert seen.query_start_loc_cpu.tolist() == seen.query_start_loc.tolist()
        assert seen.slot_mapping.tolist() == slots + [-1] * (rows - going if in_graph else 0)
        assert inputs.input_ids.tolist() == inputs.sampled[:going].tolist() + [99] * (rows - going)
        assert inputs.positions.tolist() == [n - 1 for n in expected] + [77] * (rows - going)
        if not in_graph:
            assert (seen.num_actual_tokens, seen.max_query_len, seen.max_seq_len) == (going, 1, max(expected))
    assert batch.seq_lens.tolist() == lens + [0] * padding


def test_an_advanced_step_attends_like_one_that_was_assembled():
    backend = make_backend()
    impl = make_layer(backend)
    builder = make_builder(backend, impl)
    before = builder.build(make_batch([1, 1], [8, 4], width=WIDTH))
    before.batch.block_table[1, 1] = 9
    after = make_batch([1, 1], [9, 5], width=WIDTH)
    after.block_table.copy_(before.batch.block_table)
    after.block_table[0, 2] = before.batch.block_table[0, 2] = 10
    after.slot_mapping.copy_(torch.tensor([10 * BLOCK_SIZE, 9 * BLOCK_SIZE]))
    query, key, value, output = make_qkv(backend, 2)
    pages = random_cache(backend, 32)

    outputs = []
    for metadata in (builder.advance_step(before), builder.build(after)):
        cache, out = copy_of(backend, pages), output.clone()
        impl.forward(query, key, value, cache, metadata, out)
        outputs += [(out, cache)]

    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    assert same(outputs[0][1], outputs[1][1])


def test_prefills_become_decodes_when_told():
    _, _, builder = world()
    metadata = builder.build(make_batch([1, 5], [4, 5], width=WIDTH))
    metadata.batch.block_table[0, 1] = 20
    with refused(BatchError, problem="a query of 5 tokens", fix="prefills_to_decodes=True"):
        builder.advance_step(metadata)

    inputs = tokens(6, [5, 6])
    after = builder.advance_step(metadata, tokens=inputs, prefills_to_decodes=True)

    assert (after.num_decodes, after.num_prefills, after.num_decode_tokens) == (2, 0, 2)
    assert after.batch.slot_mapping.tolist() == [20 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1]
    assert inputs.positions.tolist() == [4, 5, 77, 77, 77, 77]


def test_lengths_may_be_bounds_or_absent():
    for kind, cpu in (("upper_bound", torch.tensor([9, 9], dtype=torch.int32)), ("absent", None)):
        builder = make_builder(make_backend(seq_lens_cpu_kind=kind))
        batch = evolve(make_batch([1, 1], [3, 5], width=WIDTH), max_seq_len=9, seq_lens_cpu=cpu)
        after = builder.advance_step(builder.build(batch)).batch
        assert after.seq_lens.tolist() == [4, 6]
        assert after.max_seq_len == 10
        assert (after.seq_lens_cpu is None) == (cpu is None)
        assert cpu is None or after.seq_lens_cpu.tolist() == [10, 10]


def test_no_room_is_refused_before_anything_moves():
    _, _, builder = world()
    metadata = builder.build(make_batch([1], [BLOCK_SIZE]))
    inputs = tokens(1, [5])
    with refused(BatchError, problem="a sequence of 5 tokens", expected="1 columns of 4", fix="allocate"):
        builder.advance_step(metadata, tokens=inputs)
    short = DecodeInputs(torch.tensor([1]), torch.tensor([99]), torch.zeros(0, dtype=torch.int64))
    with refused(TensorError, problem="positions", expected="1 requests"):
        builder.advance_step(builder.build(make_batch([1], [3])), tokens=short)
    assert (inputs.input_ids.tolist(), short.input_ids.tolist()) == ([99], [99])


@pytest.mark.parametrize("count", [0, 3, True, 1.5])
def test_as_many_go_on_as_there_were(count):
    _, _, builder = world()
    with refused(BatchError, problem="num_queries=", expected="2 requests"):
        builder.advance_step(builder.build(make_batch([1, 1], [2, 3])), num_queries=count)


def test_what_cannot_be_advanced_is_refused():
    _, _, builder = world()
    with refused(BatchError, problem="request 0 is padding", fix="at the end"):
        builder.advance_step(builder.build(make_batch([0, 1], [0, 3])))
    with refused(BatchError, problem="metadata", expected="toy/plain"):
        builder.advance_step(make_builder(make_backend(sliding_window=3)).build(make_batch([1], [2])))
    with refused(NotNegotiatedError, problem="custom mask"):
        masked = make_builder(make_backend(custom_mask=True))
        masked.advance_step(masked.build(make_batch([1], [3], custom_mask=torch.ones(3, dtype=torch.bool))))
    with refused(NotNegotiatedError, problem="extra 'acme.rope'"):  # positions of the step before, say
        open_ended = make_builder(make_backend(features=("acme.rope",)))
        open_ended.advance_step(open_ended.build(make_batch([1], [3], extra={"acme.rope": torch.tensor([2])})))


def test_cross_attention_writes_nothing():
    builder = make_builder(make_backend(attn_type="encoder_decoder"))
    lens = torch.tensor([4, 4], dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int64)
    batch = make_batch([1, 1], [4, 4], encoder_seq_lens=lens, slot_mapping=none, causal=False)
    after = builder.advance_step(builder.build(batch)).batch
    assert after.slot_mapping.shape == (0,)
    assert after.encoder_seq_lens is lens


# --- another group's pages ----------------------------------------------------------------------------------------


def test_metadata_is_reused_for_another_group():
    backend = make_backend()
    impl = make_layer(backend)
    builder = make_builder(backend, impl)
    metadata = builder.build(make_batch([1, 2], [6, 7], width=WIDTH))
    before = metadata.batch.block_table.clone()
    table = before.clone()
    table[:, :2] += 10
    slots = metadata.batch.slot_mapping + 10 * BLOCK_SIZE

    other = builder.update_block_table(metadata, table, slots)

    assert torch.equal(metadata.batch.block_table, before)
    assert other.batch.block_table is table
    assert (other.num_decodes, other.num_prefills) == (1, 1)
    query, key, value, output = make_qkv(backend, 3)
    pages = random_cache(backend, 32)
    moved = backend.make_cache(32)
    for role, tensor in pages.tensors.items():
        moved[role].copy_(tensor.roll(10, 0))
    expected = output.clone()
    impl.forward(query, key, value, pages, metadata, expected)
    impl.forward(query, key, value, moved, other, output)
    torch.testing.assert_close(output, expected)


def test_other_pages_are_checked():
    _, _, builder = world()
    metadata = builder.build(make_batch([1], [6]))
    with refused(BatchError, expected="2 blocks"):
        builder.update_block_table(metadata, metadata.batch.block_table[:, :1], metadata.batch.slot_mapping)
    with refused(BatchError, problem="metadata"):
        other = make_builder(make_backend(sliding_window=3))
        other.update_block_table(metadata, metadata.batch.block_table, metadata.batch.slot_mapping)
    (graph,), _ = capture(builder, GraphShape(2, 2, 1))
    in_graph = builder.build(metadata.batch, graph=graph)
    with refused(BatchError, problem="GraphBuffers", fix="graph=graph"):
        builder.update_block_table(in_graph, metadata.batch.block_table, metadata.batch.slot_mapping)


def test_a_host_advances_its_own_inputs():
    _, _, builder = world()
    with builder.state.graph_capture(2):
        graph = builder.state.graph(GraphShape(2, 2, 1), host_owned_inputs=True)
        metadata = builder.build(make_batch([1, 1], [5, 3], width=WIDTH), graph=graph)
    with refused(BatchError, problem="GraphBuffers", expected="the host's own", fix="graph=graph"):
        builder.advance_step(metadata)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_batch_that_stands_in_goes_on_standing_in(in_graph):
    """A rank without requests runs as many steps as the others; its pages and lengths never grow."""
    backend, _, builder = world("single_token_decode")
    graph = capture(builder, GraphShape(2, 2, 1))[0][0] if in_graph else None
    batch = backend.dummy_batch(GraphShape(2, 2, 1))
    metadata = builder.build(batch, graph=graph)
    for _ in range(2 * BLOCK_SIZE):
        inputs = tokens(2, [5, 6])
        metadata = builder.advance_step(metadata, tokens=inputs)
        assert metadata.batch.seq_lens.tolist() == batch.seq_lens.tolist()
        assert metadata.batch.slot_mapping.tolist() == [-1, -1]
        assert inputs.input_ids.tolist() == [5, 6]
