"""Windowed and full layers in one state: their replays and eager steps in turn, compared with the oracle."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import GraphShape, Limits, capture
from attnplug.request.device import Device
from attnplug_kit.oracle import Case, assert_close, materialize

MOST = 3
LONGEST = 48
LIMITS = Limits(max_num_reqs=MOST, max_num_tokens=MOST, max_seq_len=LONGEST)


class Group:
    """A layer with its builder in a shared state, and what its graph reads and writes."""

    def __init__(self, state, **fields):
        self.fields = fields
        requested = self.case([3], 0).requirements(block_size=4, kv_layout="NHD", cudagraph="single_token_decode")
        self.backend = attnplug.load(requested, Device.cpu(), backend="torch/sdpa")
        self.sinks = materialize(self.case([3], 0)).sinks
        self.state = state or self.backend.make_state(LIMITS)
        self.impl = self.backend.make_impl(self.scene([3], 0).layer())
        self.builder = self.backend.make_builder([self.impl], self.state)
        self.cache = self.backend.make_cache(MOST * LONGEST // 4 + 8)  # scenes have spare blocks
        impl = self.impl
        heads = ((impl.num_q_heads, impl.head_size), (impl.num_kv_heads, impl.head_size))
        self.inputs = [torch.zeros(MOST, *heads[0]), *(torch.zeros(MOST, *heads[1]) for _ in range(2))]
        self.output = torch.zeros(MOST, impl.output_width)

    def case(self, contexts, seed):
        lens = {"query_lens": (1,) * len(contexts), "context_lens": tuple(contexts), "seed": seed, "block_size": 4}
        return Case(**lens, **self.fields)

    def scene(self, contexts, seed):
        return evolve(materialize(self.case(contexts, seed)), sinks=self.sinks)

    def place(self, scene):
        """Put a scene where the graph reads it, and return its batch."""
        call = scene.paged(self.backend)
        for role, pages in call.cache.tensors.items():
            self.cache[role][: call.cache.num_blocks].copy_(pages)
        for mine, theirs in zip(self.inputs, (call.query, call.key, call.value), strict=True):
            mine[: theirs.shape[0]].copy_(theirs)
        return call.batch

    def forward(self, metadata):
        rows = metadata.batch.num_actual_tokens
        self.impl.forward(*(tensor[:rows] for tensor in self.inputs), self.cache, metadata, self.output[:rows])

    def check(self, scene):
        found = self.output[: scene.case.num_tokens].view(scene.case.num_tokens, self.impl.num_q_heads, -1)
        assert_close(found, scene.expected().output, dtype=found.dtype, scale=scene.largest_value)


STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, LONGEST - 1), min_size=1, max_size=MOST), st.booleans()), min_size=1, max_size=4
)


@pytest.mark.parametrize("prepares", [True, False])
@settings(max_examples=15, deadline=None)
@given(steps=STEPS)
def test_layers_of_several_agreements_share_steps(steps, prepares):
    full = Group(None)
    groups = [full, Group(full.state, sliding_window=5), Group(full.state, num_kv_heads=1, sinks=True)]
    state = full.state
    needed = [group.backend.workspace_bytes(state.limits) for group in groups]
    assert state.workspace.numel() == max(needed)
    with state.graph_capture(MOST):
        graph = state.graph(GraphShape(MOST, MOST, 1, LONGEST))
        metadata = [group.builder.build(graph.dummy_batch(group.builder), graph=graph) for group in groups]

        def step():
            for group, each in zip(groups, metadata, strict=True):
                if prepares:
                    group.builder.prepare(each)
            for group, each in zip(groups, metadata, strict=True):
                group.forward(each)

        _, replay = capture(step, torch.device("cpu"))
    for seed, (contexts, eager) in enumerate(steps):
        scenes = [group.scene(contexts, seed) for group in groups]
        batches = {group.builder: group.place(scene) for group, scene in zip(groups, scenes, strict=True)}
        if eager:
            built = {builder: builder.build(batch) for builder, batch in batches.items()}
            for group in groups:
                group.forward(built[group.builder])
        else:
            assert state.begin_forward(batches).graph is graph
            replay()
        for group, scene in zip(groups, scenes, strict=True):
            group.check(scene)


def test_decode_steps_run_without_builds():
    """Tensors of the host advance on the device: four replays, and one build before the first."""
    group = Group(None)
    assert group.builder.replays_without_build
    contexts, size = [9, 20, 3], 4
    last = [group.scene([context + step for context in contexts], 0) for step in range(4)]
    table = torch.zeros(MOST, LONGEST // size, dtype=torch.int32)
    for row in range(MOST):
        table[row] = torch.arange(LONGEST // size) + 1 + row * (LONGEST // size)
    lens = torch.tensor([context + 1 for context in contexts], dtype=torch.int32)
    slots = torch.tensor([slot_of(table, row, int(length) - 1, size) for row, length in enumerate(lens)])
    batch = attnplug.contract.Batch.from_lengths([1] * MOST, lens.tolist(), block_table=table, slot_mapping=slots)
    with group.state.graph_capture(MOST):
        graph = group.state.graph(GraphShape(MOST, MOST, 1, LONGEST), host_owned_inputs=True)
        metadata = group.builder.build(batch, graph=graph)

        def step():
            group.builder.prepare(metadata)
            group.forward(metadata)

        _, replay = capture(step, torch.device("cpu"))
    for scene in last:
        write_scene(group, scene, batch, table, size)
        replay()
        group.check(scene)


def slot_of(table, row, position, size):
    return int(table[row, position // size]) * size + position % size


def write_scene(group, scene, batch, table, size):
    """Write a scene's cached rows into pages of a fixed table, and its lengths and slots in place."""
    keys, values = group.cache.k, group.cache.v
    for row, (cached_keys, cached_values) in enumerate(zip(scene.keys, scene.values, strict=True)):
        context = scene.case.context_lens[row]
        for position in range(context):
            block, offset = int(table[row, position // size]), position % size
            keys[block, offset], values[block, offset] = cached_keys[position], cached_values[position]
        group.inputs[0][row], group.inputs[1][row] = scene.queries[row][0], cached_keys[context]
        group.inputs[2][row] = cached_values[context]
        batch.seq_lens[row] = context + 1
        batch.slot_mapping[row] = slot_of(table, row, context, size)
