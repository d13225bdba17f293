"""Custom masks in graphs: drafted trees that replays verify, between eager steps, compared with the oracle."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import Batch, GraphShape, Limits, capture
from attnplug.request.device import Device
from attnplug_kit.oracle import Case, assert_close, materialize


def tree_mask(query_len: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    """Return the mask of a random draft tree: each token attends to the context, to its ancestors and to itself."""
    mask = torch.zeros(query_len, seq_len, dtype=torch.bool)
    first = seq_len - query_len
    mask[:, :first] = True
    for node in range(query_len):
        if node:
            parent = int(torch.randint(0, node, (), generator=generator))
            mask[node] = mask[parent]
        mask[node, first + node] = True
    return mask


def trees(contexts, query_len, seed):
    """Return a scene of draft trees behind these contexts."""
    case = Case(
        query_lens=(query_len,) * len(contexts),
        context_lens=tuple(contexts),
        decode_query_len=query_len,
        block_size=4,
        custom_mask=True,
        seed=7,
    )
    scene, generator = materialize(case), torch.Generator().manual_seed(seed)
    return evolve(scene, masks=tuple(tree_mask(query_len, keys, generator) for keys in case.key_lens))


def copy_into(cache, other):
    """Copy the blocks of a smaller KV cache."""
    for role, tensor in other.tensors.items():
        cache[role][: other.num_blocks].copy_(tensor)


class Engine:
    """A layer over one cache, whose steps are replayed or eager."""

    def __init__(self, query_len, num_reqs, max_seq_len):
        requested = trees([0], query_len, 0).case.requirements(block_size=4, kv_layout="NHD", cudagraph="uniform_batch")
        self.backend = attnplug.load(requested, Device.cpu(), backend="torch/sdpa")
        limits = Limits(max_num_reqs=num_reqs, max_num_tokens=num_reqs * query_len, max_seq_len=max_seq_len)
        self.impl = self.backend.make_impl(trees([0], query_len, 0).layer())
        self.builder = self.backend.make_builder([self.impl], self.backend.make_state(limits))
        self.rows = num_reqs * query_len
        self.cache = self.backend.make_cache(num_reqs * -(-max_seq_len // 4) + 2)
        heads = (self.impl.num_q_heads, self.impl.num_kv_heads, self.impl.num_kv_heads)
        self.inputs = [torch.zeros(self.rows, number, self.impl.head_size) for number in heads]
        self.output = torch.zeros(self.rows, self.impl.output_width)
        self.graphs = {}

    def record(self, num_reqs, query_len, max_seq_len, *, prepares):
        key = GraphShape(num_reqs, num_reqs * query_len, query_len, max_seq_len)
        with self.builder.state.graph_capture(self.builder.limits.max_num_reqs):
            graph = self.builder.state.graph(key)
            metadata = self.builder.build(graph.dummy_batch(self.builder), graph=graph)
            rows = [tensor[: key.num_tokens] for tensor in self.inputs]

            def step():
                if prepares:
                    self.builder.prepare(metadata)
                self.impl.forward(*rows, self.cache, metadata, self.output[: key.num_tokens])

            self.graphs[key] = (metadata, capture(step, torch.device("cpu"))[1])

    def run(self, scene, *, eager):
        """Run a step and compare its output with the oracle's; return the metadata and the graph's key."""
        call, tokens = scene.paged(self.backend), scene.case.num_tokens
        copy_into(self.cache, call.cache)
        for mine, theirs in zip(self.inputs, (call.query, call.key, call.value), strict=True):
            mine.fill_(torch.nan)[:tokens].copy_(theirs)
        state = self.builder.state
        graph = None if eager else state.find_graph({self.builder: call.batch})
        metadata = self.builder.build(call.batch, graph=graph)
        if graph is None:
            self.impl.forward(*(rows[:tokens] for rows in self.inputs), self.cache, metadata, self.output[:tokens])
        else:
            self.graphs[graph.key][1]()
        found = self.output[:tokens].view(tokens, self.impl.num_q_heads, -1)
        assert_close(found, scene.expected().output, dtype=found.dtype, scale=scene.largest_value)
        return metadata, None if graph is None else graph.key


STEPS = st.lists(st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.booleans()), min_size=2, max_size=6)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(1, 5), st.booleans())
def test_trees_are_verified_by_replays(steps, query_len, prepares):
    engine = Engine(query_len, 4, 40)
    for num_reqs, longest in ((4, 40), (2, 40), (2, 16)):
        engine.record(num_reqs, query_len, longest, prepares=prepares)
    for seed, (contexts, eager) in enumerate(steps):
        _, key = engine.run(trees(contexts, query_len, seed), eager=eager)
        assert (key is None) is eager


def test_masks_are_padded_to_the_shape():
    engine = Engine(3, 4, 40)
    engine.record(4, 3, 40, prepares=False)
    ((captured, _),) = engine.graphs.values()
    address = captured.batch.custom_mask.data_ptr()
    for seed, contexts in enumerate(([9, 20, 5, 30], [2, 11], [0])):
        scene = trees(contexts, 3, seed)
        metadata, _ = engine.run(scene, eager=False)
        mask = metadata.batch.custom_mask
        assert (mask.shape, mask.data_ptr()) == ((4, 3, 40), address)
        for request, expected in enumerate(scene.masks):
            assert torch.equal(mask[request, :, : expected.shape[1]], expected)
            assert not mask[request, :, expected.shape[1] :].any()
        assert not mask[len(contexts) :].any()


def test_masks_of_shapes_share_memory():
    engine = Engine(3, 4, 40)
    for num_reqs, longest in ((4, 40), (2, 40), (1, 16)):
        engine.record(num_reqs, 3, longest, prepares=False)
    masks = [metadata.batch.custom_mask for metadata, _ in engine.graphs.values()]
    assert [tuple(mask.shape) for mask in masks] == [(4, 3, 40), (2, 3, 40), (1, 3, 16)]
    assert len({mask.data_ptr() for mask in masks}) == 1


def test_stale_lengths_of_padded_requests_have_no_mask():
    """A padded request has no query, and so no place in the ragged mask, whatever its length says."""
    engine = Engine(2, 2, 16)
    engine.record(2, 2, 16, prepares=False)
    call = trees([5], 2, 0).paged(engine.backend)
    batch = call.batch
    padded = type(batch).from_lengths(
        [2, 0],
        [7, 9],
        block_table=torch.cat((batch.block_table, torch.ones_like(batch.block_table))).repeat(1, 2)[:, :4],
        slot_mapping=batch.slot_mapping,
        custom_mask=batch.custom_mask,
    )
    (key,) = engine.graphs
    metadata = engine.builder.build(padded, graph=engine.builder.state.graph(key))
    assert torch.equal(metadata.batch.custom_mask[0, :, :7].flatten(), batch.custom_mask)
    assert not metadata.batch.custom_mask[1].any()


def test_host_owned_inputs_come_with_a_ragged_mask():
    engine = Engine(2, 2, 16)
    scene = trees([5, 9], 2, 0)
    batch = scene.paged(engine.backend).batch
    with engine.builder.state.graph_capture(2):
        graph = engine.builder.state.graph(GraphShape(2, 4, 2, 16), host_owned_inputs=True)
        captured = engine.builder.build(batch, graph=graph)
    other = trees([5, 9], 2, 1)
    engine.builder.build(evolve(batch, custom_mask=torch.cat([mask.flatten() for mask in other.masks])), graph=graph)
    assert torch.equal(captured.batch.custom_mask[1, :, :11], other.masks[1])
    assert not engine.builder.replays_without_build


def test_a_wrong_mask_leaves_the_graph_alone():
    engine = Engine(2, 2, 16)
    engine.record(2, 2, 16, prepares=False)
    scene = trees([5], 2, 0)
    metadata, _ = engine.run(scene, eager=False)
    before, batch = metadata.batch.custom_mask.clone(), scene.paged(engine.backend).batch
    with pytest.raises(attnplug.AttnplugError, match="custom_mask"):
        engine.builder.build(
            evolve(batch, custom_mask=batch.custom_mask[1:]),
            graph=engine.builder.state.graph(next(iter(engine.graphs))),
        )
    assert torch.equal(metadata.batch.custom_mask, before)


@pytest.mark.parametrize("owned", [False, True])
def test_a_host_pads_masked_batches(owned):
    """The last requests are padding with a real length: they have no mask, and touch the null block alone."""
    engine = Engine(2, 4, 16)
    scene = trees([5, 9], 2, 0)
    call = scene.paged(engine.backend)
    table = torch.cat((call.batch.block_table, torch.zeros_like(call.batch.block_table)))
    table[table > 100] = 0
    batch = Batch.from_lengths(
        [2, 2, 2, 2],
        [7, 11, 7, 7],
        block_table=table,
        slot_mapping=torch.cat((call.batch.slot_mapping, torch.full((4,), -1))),
        custom_mask=call.batch.custom_mask,
        num_padded_reqs=2,
    )
    state, key = engine.builder.state, GraphShape(4, 8, 2, 16)
    with state.graph_capture(4):
        graph = state.graph(key, host_owned_inputs=owned)
        metadata = engine.builder.build(batch if owned else graph.dummy_batch(), graph=graph)
    assert state.begin_forward({engine.builder: batch}).graph is graph
    assert not metadata.batch.custom_mask[2:].any()
    assert torch.equal(metadata.batch.custom_mask[1, :, :11], scene.masks[1])

    copy_into(engine.cache, call.cache)
    engine.cache.k[0] = engine.cache.v[0] = 0
    for mine, theirs in zip(engine.inputs, (call.query, call.key, call.value), strict=True):
        mine.zero_()[:4].copy_(theirs)
    engine.impl.forward(*engine.inputs, engine.cache, metadata, engine.output)
    found = engine.output[:4].view(4, engine.impl.num_q_heads, -1)
    assert_close(found, scene.expected().output, dtype=found.dtype, scale=scene.largest_value)
    assert not engine.cache.k[0].any()
    assert not engine.cache.v[0].any()
