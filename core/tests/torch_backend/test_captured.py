"""Graphs of the built-in backend: replays of what a build wrote, compared with the oracle."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import GraphShape, Limits
from attnplug.errors import NoBackendError
from attnplug.request.device import Device
from attnplug.torch_backend import builder, sdpa
from attnplug_kit.oracle import FEATURES, Case, Scene, cases, check_replays, materialize, padded_for
from core.tests.torch_backend.tiers import in_two_tiers

SERVED = tuple(name for name in FEATURES if name not in {"attn_type", "cascade"})
LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=5)


def load(case: Case, layout: str = "NHD", **engine: object):
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, cudagraph="uniform_batch", **engine)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def scenes_of(case: Case, steps: list[list[int]], query_len: int, num_reqs: int):
    """Scenes of one shape and one layer, which differ in the number of requests and their lengths."""
    scenes = [
        materialize(
            padded_for(
                evolve(
                    case,
                    query_lens=(query_len,) * len(lens),
                    context_lens=tuple(lens),
                    decode_query_len=query_len,
                    seed=case.seed,
                ),
                num_reqs - len(lens),
            )
        )
        for lens in steps
    ]
    return [evolve(scene, sinks=scenes[0].sinks) for scene in scenes]


def check_steps(case, steps, query_len, spare, longer, layout, return_lse, prepares):
    num_reqs = max(map(len, steps)) + spare
    longest = max(max(lens) for lens in steps) + query_len + longer
    scenes = scenes_of(case, steps, query_len, num_reqs)
    backend = load(scenes[0].case, layout, return_lse=return_lse)
    check_replays(backend, scenes, num_reqs=num_reqs, max_seq_len=longest, prepares=prepares)


test_replays, test_replays_at_length = in_two_tiers(
    check_steps,
    cases(features=SERVED, kv_sharing=False),
    st.lists(LENGTHS, min_size=1, max_size=3),
    st.sampled_from([1, 1, 2, 5]),
    st.integers(0, 2),
    st.sampled_from([0, 1, 30]),
    st.sampled_from(["NHD", "HND"]),
    st.booleans(),
    st.booleans(),
    fast=40,
    full=120,
)


@settings(max_examples=30)
@given(case=cases(features=SERVED, kv_sharing=False), lens=LENGTHS, query_len=st.sampled_from([1, 3]))
def test_replays_of_several_groups_and_tiles(case, lens, query_len):
    """With few keys per gather a shape has several groups; with few scores a group has several tiles."""
    sizes = builder.Sizes(gathered=2**12, mask=2**10, scores=64, rows=2, call=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "sizes_on", lambda _: sizes)
        patch.setattr(builder, "choose_kernel", lambda *_: sdpa.UNFUSED)
        scenes = scenes_of(case, [lens], query_len, len(lens))
        check_replays(load(scenes[0].case), scenes, num_reqs=len(lens), max_seq_len=max(lens) + query_len)


@settings(max_examples=30)
@given(case=cases(features=("logits_soft_cap", "sinks", "head_size_v"), attn_type="encoder_decoder"), lens=LENGTHS)
def test_replays_of_cross_attention(case, lens):
    num_reqs = len(lens) + 1
    fixed = evolve(case, query_lens=(1,) * len(lens), context_lens=(3,) * len(lens), encoder_lens=tuple(lens))
    scene = materialize(padded_for(fixed, 1))
    check_replays(load(fixed), [scene], num_reqs=num_reqs, max_seq_len=max(4, *lens))


@pytest.mark.parametrize("requested", [{"sliding_window": 5}, {"attention_chunk": 16}])
def test_blocks_before_the_visible_keys_may_be_freed(requested, monkeypatch):
    """Hosts free blocks that no query attends to; the block table then names blocks of other requests."""
    case = padded_for(Case(query_lens=(1, 1), context_lens=(70, 40), block_size=4, **requested), 1)
    plain = Scene.paged

    def paged(scene, backend, device=None):
        call = plain(scene, backend, device)
        table = call.batch.block_table.clone()
        for pages in (call.cache.k, call.cache.v):
            pages[table[:, :8].flatten().long()] = torch.nan
        table[:, :8] = 2**30
        return evolve(call, batch=evolve(call.batch, block_table=table, block_table_cpu=table))

    monkeypatch.setattr(Scene, "paged", paged)
    check_replays(load(case), [materialize(case)], num_reqs=3, max_seq_len=80)


def test_padding_gives_no_nan():
    case = padded_for(Case(query_lens=(1,), context_lens=(5,), decode_query_len=1), 3)
    (ran,) = check_replays(load(case), [materialize(case)], num_reqs=4, max_seq_len=16)
    assert not ran.output.isnan().any()


def test_what_graphs_cannot_hold_is_refused():
    requested = Case(query_lens=(1,), context_lens=(5,)).requirements(block_size=None).evolve(paged=False)
    with pytest.raises(NoBackendError, match=r"a\s+graph's\s+are\s+fixed"):
        attnplug.load(requested.evolve(cudagraph="single_token_decode"), Device.cpu(), backend="torch/sdpa")
    backend = attnplug.load(requested, Device.cpu(), backend="torch/sdpa")
    assert backend.agreement.cudagraph == "never"


def test_mixed_batches_run_eagerly():
    case = Case(query_lens=(1, 4), context_lens=(5, 0))
    backend = load(case)
    assert backend.agreement.cudagraph == "uniform_batch"
    scene = materialize(case)
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(Limits(max_num_reqs=4, max_num_tokens=8, max_seq_len=16)))
    with builder.state.graph_capture(4):
        graph = builder.state.graph(GraphShape(4, 4, 1))
        builder.build(graph.dummy_batch(), graph=graph)
    assert builder.state.find_graph({builder: scene.paged(backend).batch}) is None
    assert torch.equal(graph.dummy_batch().seq_lens, torch.full((4,), 2, dtype=torch.int32))
