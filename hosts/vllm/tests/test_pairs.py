"""A routed pair in vLLM: pure decodes run on one backend, all other batches on another, in eager steps and graphs."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch
from vllm.config import CUDAGraphMode

import attnplug
from attnplug.errors import NoBackendError
from attnplug_vllm import facts, registration, selector
from hosts.vllm.tests.rig import Rig
from tests.torch_pair import PAIR, RUNS, offer_pair

DECODES = CUDAGraphMode.FULL_DECODE_ONLY
LAYERS = [{}, {"sliding_window": 8}, {"kv_sharing_target_layer_name": "layers.0"}]


@pytest.fixture(autouse=True)
def pair(tmp_path, monkeypatch):
    return offer_pair(tmp_path, monkeypatch)


def runs():
    """Return what ran since the last call: the backend, and the query lengths; layers of a step count once."""
    found = list(dict.fromkeys((name, tuple(lens)) for name, lens in RUNS))
    RUNS.clear()
    return found


def test_each_step_runs_on_its_side(pair):
    rig = Rig(LAYERS, choice=(pair,))
    rig.add(3)
    for step, side in [
        ([(0, 5), (1, 37)], "second"),
        ([(0, 1), (1, 1)], "first"),
        ([(0, 1), (1, 1), (2, 9)], "second"),  # decodes beside a prefill
        ([(2, 1)], "first"),
        ([(1, 1), (0, 4)], "second"),
    ]:
        assert rig.run(step) < 1e-5
        assert [name for name, _ in runs()] == [side]


def test_the_last_token_of_a_chunked_prefill_is_a_decode(pair):
    rig = Rig([{}], choice=(pair,))
    rig.add(2)
    assert rig.run([(0, 8)]) < 1e-5
    assert rig.run([(0, 1), (1, 1)]) < 1e-5  # the rest of a prompt, and a prompt of one token
    assert runs() == [("second", (8,)), ("first", (1, 1))]


@pytest.mark.parametrize("mode", [DECODES, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_graphs_of_decodes_are_built_by_one_side(pair, mode):
    rig = Rig(LAYERS, choice=(pair,), mode=mode)
    graphs = {reqs: rig.capture(reqs) for reqs in (4, 2)}
    assert {name for name, _ in runs()} == {"first"}
    rig.builder.build_for_cudagraph_capture(rig.dummy(2))  # an idle rank of data parallelism
    rig.add(3)
    rig.run([(0, 5), (1, 37), (2, 1)])
    assert [name for name, _ in runs()] == ["second"]
    for step, reqs in [((0, 1, 2), 4), ((2, 0), 2), ((1,), 2)]:
        assert rig.replay(graphs[reqs], [(index, 1) for index in step], reqs) < 1e-5
        assert {name for name, _ in runs()} == {"first"}
        assert rig.run([(0, 1), (1, 3)]) < 1e-5
        assert [name for name, _ in runs()] == ["second"]


def test_drafts_that_are_verified_are_decodes(pair):
    rig = Rig(LAYERS, choice=(pair,), mode=DECODES, drafts=3)
    graph = rig.capture(2, 4)
    rig.add(2)
    rig.run([(0, 5), (1, 37)])
    runs()
    assert rig.replay(graph, [(0, 4), (1, 4)], 2) < 1e-5
    assert {name for name, _ in runs()} == {"first"}
    assert rig.run([(0, 2), (1, 4)]) < 1e-5  # of other lengths, which no graph has
    assert [name for name, _ in runs()] == ["second"]


def test_other_sinks_and_scales_reach_both_sides(pair):
    sinks, scales = torch.randn(4), {"k": torch.tensor(1.0), "v": torch.tensor(1.0)}
    rig = Rig([{"sinks": sinks}], choice=(pair,), kv_cache_dtype="fp8", scales=scales)
    (layer,) = rig.layers.values()
    sides = layer.impl.binding.attn.wrapped.decode, layer.impl.binding.attn.wrapped.rest
    rig.add(1)
    rig.run([(0, 5)])
    derived = []
    for side in sides:
        side.parameters_changed = lambda side=side: derived.append(side.layer)

    scales["k"].fill_(2.0)
    layer.impl.take_pool(layer, layer.kv_cache)
    assert [one.k_scale for one in derived] == [2.0, 2.0]
    derived.clear()
    sinks.add_(1.0)  # new weights, loaded in place
    layer.impl.take_pool(layer, layer.kv_cache)
    assert derived == [layer.impl.binding.attn.layer] * 2


def test_the_setting_names_a_pair(monkeypatch, pair):
    monkeypatch.setenv("ATTNPLUG_BACKEND", pair)
    attnplug.refresh()
    rig = Rig([{}], choice=())
    rig.add(1)
    assert rig.run([(0, 3)]) < 1e-5
    assert rig.run([(0, 1)]) < 1e-5
    assert runs() == [("second", (3,)), ("first", (1,))]
    assert {candidate.id for candidate in facts.candidates(())} >= {"first/sdpa", "second/sdpa"}
    assert torch.float32 in selector.dtypes(())
    assert registration.choices()[registration.AUTO] == ()


def test_a_pair_that_cannot_serve_says_why(pair):
    wanted = facts.layer_requirements(
        head_size=16, dtype="float32", batch_invariant=True, num_q_heads=4, num_kv_heads=2
    )
    with pytest.raises(NoBackendError) as caught:
        facts.select(wanted, (pair,))
    assert f"{PAIR}: a request's result would depend on the batch" in caught.value.expected
