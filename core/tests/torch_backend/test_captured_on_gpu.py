"""CUDA graphs of the built-in backend: the cases of the CPU tests, and no device synchronization."""

from __future__ import annotations

import random

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug.contract import GraphShape, Limits, capture
from attnplug.request.device import Device
from attnplug_kit.oracle import (
    Case,
    check_replays,
    check_replays_without_build,
    materialize,
    padded_for,
    random_case,
)
from tests.backends.harness import no_synchronization

pytestmark = pytest.mark.gpu

FEATURES = (
    "sliding_window",
    "attention_chunk",
    "logits_soft_cap",
    "alibi",
    "sinks",
    "head_size_v",
    "custom_mask",
    "mm_prefix",
    "kv_cache_dtype",
)


def load(case, layout="NHD", **engine):
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, cudagraph="uniform_batch", **engine)
    return attnplug.load(requested, Device.current(), backend="torch/sdpa")


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prepares", [True, False])
def test_graphs_match_the_oracle(query_len, layout, prepares, record_property):
    generator = random.Random(11)
    for _ in range(40):
        case = random_case(generator, features=FEATURES)
        lens = [[generator.randint(0, 90) for _ in range(generator.randint(1, 5))] for _ in range(3)]
        num_reqs = max(map(len, lens)) + generator.randint(0, 2)
        shaped = [
            evolve(
                case,
                query_lens=(query_len,) * len(one),
                context_lens=tuple(one),
                decode_query_len=query_len,
            )
            for one in lens
        ]
        scenes = [materialize(padded_for(one, num_reqs - len(one.query_lens))) for one in shaped]
        scenes = [evolve(scene, sinks=scenes[0].sinks) for scene in scenes]
        backend = load(scenes[0].case, layout, return_lse=generator.random() < 0.5)
        check_replays(backend, scenes, num_reqs=num_reqs, max_seq_len=100, prepares=prepares)
    record_property("graphs", 40)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("custom_mask", "mm_prefix"), [(False, False), (True, False), (False, True)])
def test_builds_for_a_graph_do_not_wait_for_the_device(custom_mask, mm_prefix):
    lens = (300, 20, 5, 90, 7, 8, 9, 1)
    case = Case(query_lens=(1,) * 8, context_lens=lens, dtype="bfloat16", custom_mask=custom_mask, mm_prefix=mm_prefix)
    scene, backend = materialize(case), load(case)
    impl, call = backend.make_impl(scene.layer(device="cuda")), scene.paged(backend, "cuda")
    limits = Limits(max_num_reqs=8, max_num_tokens=8, max_seq_len=512)
    builder = backend.make_builder([impl], backend.make_state(limits))
    with builder.state.graph_capture(8):
        graph = builder.state.graph(GraphShape(8, 8, 1))
        builder.build(graph.dummy_batch(), graph=graph)
    with no_synchronization():
        builder.build(call.batch, graph=graph)
        metadata = builder.build(call.batch)
        if not custom_mask:
            builder.advance_step(builder.build(call.batch, graph=graph))
        builder.prepare(builder.build(call.batch, graph=graph))
        impl.forward(call.query, call.key, call.value, call.cache, metadata, call.output)


@pytest.mark.parametrize("query_len", [1, 3])
def test_replays_follow_lengths_on_the_device(query_len):
    case = Case(query_lens=(query_len,) * 4, context_lens=(9, 30, 2, 17), decode_query_len=query_len)
    contexts = ((9, 30, 2, 17), (40, 1, 60, 5), (0, 80, 33, 8))
    scenes = [materialize(evolve(case, context_lens=lens)) for lens in contexts]
    assert check_replays_without_build(load(case), scenes, max_seq_len=100)


def test_a_graph_that_records_its_preparation_is_noticed():
    """CUDA says whether the stream captures: warm-up runs of the same call change nothing."""
    case = Case(query_lens=(1, 1), context_lens=(9, 30))
    backend = load(case)
    impl = backend.make_impl(materialize(case).layer(device="cuda"))
    limits = Limits(max_num_reqs=2, max_num_tokens=2, max_seq_len=64)
    builder = backend.make_builder([impl], backend.make_state(limits))
    with builder.state.graph_capture(2):
        graph = builder.state.graph(GraphShape(2, 2, 1))
        metadata = builder.build(graph.dummy_batch(), graph=graph)
        builder.prepare(metadata)
        assert not graph.prepares_itself(builder)
        capture(lambda: builder.prepare(metadata), torch.device("cuda"))
    assert graph.prepares_itself(builder)
