"""The opaque op on a GPU: a compiled model on the built-in backend, and steps that overlap."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug.contract import GraphShape, Limits, capture, forward_context
from attnplug.request.device import Device
from attnplug_kit.oracle import Case, assert_close, materialize

pytestmark = pytest.mark.gpu

CASE = Case(query_lens=(1, 1, 7), context_lens=(40, 5, 20), head_size=64, dtype="bfloat16")


def load(case, **engine):
    requested = case.requirements(block_size=case.block_size, kv_layout="NHD", **engine)
    return attnplug.load(requested, Device.current(), backend="torch/sdpa")


def close(output, scene):
    case = scene.case
    got = output[: case.num_tokens].view(case.num_tokens, case.num_q_heads, -1)
    assert_close(got, scene.expected().output, dtype=output.dtype, scale=scene.largest_value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_runs_whole():
    backend, scene = load(CASE), materialize(CASE)
    impl, call = backend.make_impl(scene.layer(device="cuda")), scene.paged(backend, "cuda")
    limits = Limits(max_num_reqs=4, max_num_tokens=16, max_seq_len=64)
    metadata = backend.make_builder([impl], backend.make_state(limits)).build(call.batch)

    def model(query, key, value):
        output = torch.zeros_like(call.output)
        impl.forward_op(query + 0, key, value, call.cache, output)
        return output * 2

    with forward_context({"layer": metadata}), torch.no_grad():
        found = torch.compile(model, fullgraph=True)(call.query, call.key, call.value)
    close(found / 2, scene)


@pytest.mark.parametrize("slotted", [False, True])
def test_a_step_is_built_while_the_one_before_runs(slotted):
    """The device is kept busy, so that step N has not begun when step N + 1 is built; N must not see N + 1."""
    lens = [(90, 30, 64), (17, 95, 3), (5, 6, 70), (99, 98, 97)]
    cases = [Case(query_lens=(1, 1, 1), context_lens=one, head_size=64, dtype="bfloat16", seed=9) for one in lens]
    scenes = [materialize(case) for case in cases]
    backend = load(cases[0], cudagraph="single_token_decode")
    impl = backend.make_impl(scenes[0].layer(device="cuda"))
    limits = Limits(max_num_reqs=3, max_num_tokens=3, max_seq_len=112)
    builder = backend.make_builder([impl], backend.make_state(limits))
    calls = [scene.paged(backend, "cuda") for scene in scenes]
    replays, graph = [], None
    if slotted:
        with builder.state.graph_capture(3):
            graph = builder.state.graph(GraphShape(3, 3, 1))
            captured = builder.build(graph.dummy_batch(builder), graph=graph)
        for call in calls:
            forward = lambda c=call: impl.forward(c.query, c.key, c.value, c.cache, captured, c.output)  # noqa: E731
            replays.append(capture(forward, torch.device("cuda"))[1])
    torch.cuda.synchronize()

    torch.cuda._sleep(200_000_000)
    for index, call in enumerate(calls):
        metadata = builder.build(call.batch, graph=graph)
        if slotted:
            replays[index]()
        else:
            impl.forward(call.query, call.key, call.value, call.cache, metadata, call.output)
    torch.cuda.synchronize()

    for call, scene in zip(calls, scenes, strict=True):
        close(call.output, evolve(scene))
