"""CUDA graphs as vLLM's dispatcher captures and replays them, with the contract's stand-in for capture on the CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from attnplug.errors import LimitsError
from attnplug_vllm.builder import make_builder_class
from hosts.vllm.tests.rig import CHOICE, Rig

DECODES = CUDAGraphMode.FULL_DECODE_ONLY
LAYERS = [{}, {"sliding_window": 8}, {"kv_sharing_target_layer_name": "layers.0"}]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.feature(f"CUDA graphs, {mode.name}"))
        for mode in (DECODES, CUDAGraphMode.FULL_AND_PIECEWISE)
    ],
)
def test_decodes_are_padded_and_replayed(mode):
    rig = Rig(LAYERS, mode=mode)
    graphs = {reqs: rig.capture(reqs) for reqs in (8, 4, 2, 1)}
    rig.add(3)
    rig.run([(0, 5), (1, 37), (2, 1)])
    for step, reqs in [((0, 1, 2), 4), ((2, 0), 2), ((1,), 1), ((1, 0, 2), 8), ((0, 1), 2)]:
        assert rig.replay(graphs[reqs], [(index, 1) for index in step], reqs) < 1e-5
        assert rig.run([(0, 1), (1, 3)]) < 1e-5  # steps without a graph in between


@pytest.mark.feature("uniform decodes of speculative decoding")
def test_decodes_of_speculative_decoding_are_replayed():
    rig = Rig(LAYERS, mode=DECODES, drafts=3)
    assert rig.builder.reorder_batch_threshold == 4
    graphs = {reqs: rig.capture(reqs, 4) for reqs in (2, 1)}
    rig.add(2)
    rig.run([(0, 5), (1, 37)])
    assert rig.replay(graphs[2], [(0, 4), (1, 4)], 2) < 1e-5
    assert rig.replay(graphs[2], [(1, 4)], 2) < 1e-5
    assert rig.run([(0, 2), (1, 4)]) < 1e-5


@pytest.mark.feature("mm_prefix")
def test_spans_are_replayed():
    """The last tokens of a prompt may be a uniform step, in the graph of decodes."""
    rig = Rig([{"sliding_window": 8}], mode=DECODES, drafts=3, mm_prefix=True)
    graph = rig.capture(4, 4)
    rig.add(3)
    assert rig.run([(0, 20), (1, 20), (2, 4)], spans={0: [(2, 9)], 1: [], 2: []}) < 1e-5
    step = [(0, 4), (1, 4), (2, 4)]
    assert rig.replay(graph, step, 4, spans={0: [(17, 22)], 1: [(18, 40)], 2: []}) < 1e-5
    assert rig.replay(graph, step, 4) < 1e-5


def test_a_drafter_of_the_same_shape_runs_eagerly():
    rig = Rig(LAYERS, mode=DECODES)
    graph = rig.capture(2)
    rig.add(2)
    rig.run([(0, 5), (1, 37)])
    common = rig.common([(0, 1), (1, 1)])
    target = rig.builder.build(0, common)
    copied = common.replace(seq_lens=common.seq_lens.clone(), query_start_loc=common.query_start_loc.clone())
    draft = rig.builder.build_for_drafting(copied, 0)
    assert [part.graph is None for part in draft.parts.values()] == [True] * 3
    assert [part.graph is None for part in target.parts.values()] == [False] * 3
    assert rig.replay(graph, [(0, 1), (1, 1)], 2) < 1e-5


@pytest.mark.feature("CUDA graphs, FULL_DECODE_ONLY")
def test_a_shape_is_captured_once_and_dummy_steps_replay_it():
    rig = Rig(LAYERS, mode=DECODES)
    graph = rig.capture(2)
    rig.builder.build_for_cudagraph_capture(rig.dummy(2))  # an idle rank of data parallelism
    assert len(rig.builder.parts[0].builder.state.graphs) == 1
    rig.add(1)
    rig.run([(0, 5)])
    assert rig.replay(graph, [(0, 1)], 2) < 1e-5


def test_a_level_that_was_not_agreed_on_is_refused_at_capture():
    rig = Rig(LAYERS, mode=CUDAGraphMode.FULL)  # of any batches; the backend replays decodes
    with pytest.raises(LimitsError, match="needs the graph level 'always'"):
        rig.capture(2)
    assert not rig.builder.parts[0].builder.state.graphs


def test_the_level_is_that_of_the_weakest_layer():
    rig = Rig(LAYERS)
    builder = make_builder_class(CHOICE)
    assert builder.get_cudagraph_support(rig.config, rig.spec) is AttentionCGSupport.UNIFORM_BATCH
    encoder = Rig([{"attn_type": "encoder_only"}])
    assert builder.get_cudagraph_support(encoder.config, encoder.spec) is AttentionCGSupport.NEVER


@pytest.mark.feature("CUDA graphs, FULL_DECODE_ONLY")
def test_microbatches_are_copied_into_the_graph():
    rig = Rig(LAYERS, mode=DECODES, use_ubatching=True)
    graph = rig.capture(2)
    rig.add(2)
    rig.run([(0, 5), (1, 37)])
    buffers = rig.buffers.lens, rig.buffers.starts
    rig.buffers.lens, rig.buffers.starts = (tensor.clone() for tensor in buffers)  # cut out of the step: moved
    assert rig.replay(graph, [(0, 1), (1, 1)], 2) < 1e-5


@pytest.mark.feature("CUDA graphs, FULL_DECODE_ONLY")
def test_builders_after_a_profiling_run_have_their_own_graphs():
    rig = Rig(LAYERS, mode=DECODES)
    rig.capture(2)
    former = rig.builder.parts[0].builder.state
    rig.builder = rig.make_builder(list(rig.layers))
    rig.bind_pools()
    assert rig.builder.parts[0].builder.state is not former
    graph = rig.capture(2)
    rig.add(2)
    rig.run([(0, 5), (1, 37)])
    assert rig.replay(graph, [(0, 1), (1, 1)], 2) < 1e-5


def test_groups_of_layers_share_a_state():
    rig = Rig([{}, {"sliding_window": 8}], mode=DECODES)
    rig.builder = None
    for layer in rig.layers.values():
        layer.impl.shared = None
    first, second = (rig.make_builder([name]) for name in rig.layers)
    assert first.parts[0].builder.state is second.parts[0].builder.state
    again = rig.make_builder(["layers.0"])  # of a microbatch
    assert again.parts[0].builder.state is not first.parts[0].builder.state
    assert torch.equal(torch.tensor(len(again.parts)), torch.tensor(1))
