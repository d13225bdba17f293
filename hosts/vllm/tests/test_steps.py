"""Steps with hand-made metadata, compared with the oracle: every feature of a layer, in the orders of vLLM's runner."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch

import attnplug
from attnplug.contract import read_steps, recording
from attnplug.errors import LayerError, NotNegotiatedError
from hosts.vllm.tests.rig import ORDERS, Rig

SLOPES = [2.0 ** -(head + 1) for head in range(4)]
MIXED_WINDOWS = "sliding windows beside full layers in one KV-cache group"
LAYERS = {
    "plain": ([{}],),
    "window beside full": ([{}, {"sliding_window": 8}, {}], MIXED_WINDOWS),
    "two windows": ([{"sliding_window": 8}, {"sliding_window": 40}],),
    "soft cap": ([{"logits_soft_cap": 3.0}, {"logits_soft_cap": 0.0}], "soft cap"),
    "sinks": (
        [{"sinks": torch.tensor([0.5, -1.0, 2.0, -1e4])}, {"sinks": torch.zeros(4), "sliding_window": 20}],
        "sinks",
    ),
    "alibi": ([{"alibi_slopes": SLOPES}], "ALiBi"),
    "alibi of square roots": ([{"alibi_slopes": SLOPES, "use_alibi_sqrt": True}, {"use_alibi_sqrt": False}], "ALiBi"),
    "shared KV": ([{}, {"kv_sharing_target_layer_name": "layers.0"}], "KV sharing"),
    "all": (
        [
            {"sliding_window": 24, "logits_soft_cap": 5.0, "sinks": torch.ones(4)},
            {"logits_soft_cap": 5.0, "sinks": torch.ones(4)},
            {"kv_sharing_target_layer_name": "layers.1", "logits_soft_cap": 5.0, "sinks": torch.zeros(4)},
        ],
        MIXED_WINDOWS,
        "soft cap",
        "sinks",
        "KV sharing",
    ),
}
"""The layers of a model, and the features that they show."""

WALK = pytest.mark.feature("prefill", "chunked prefill", "mixed batches with one-token prompts last", "model runner V1")
"""What every walk has: it begins with prompts of which the last has one token."""


def test_recorded_steps_are_those_of_the_runner(tmp_path, monkeypatch) -> None:
    """In its order, by one builder for a layer with a window and one without."""
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv("ATTNPLUG_RECORD", str(file))
    attnplug.refresh()
    recording.recorder.cache_clear()
    try:
        rig = Rig([{}, {"sliding_window": 8}])
        rig.add(3)
        rig.run([(0, 5), (1, 37), (2, 1)])
        rig.run([(2, 1), (0, 9)], pad_tokens=3)
    finally:
        monkeypatch.undo()
        attnplug.refresh()
        recording.recorder.cache_clear()

    found = read_steps(file).steps
    assert {(step.query_lens, step.seq_lens) for step in found} == {((5, 37, 1), (5, 37, 1)), ((1, 9), (2, 14))}
    assert {step.layer.agreement.requirements.sliding_window for step in found} == {None, 8}
    assert "layers." not in file.read_text(encoding="utf-8")


def walk(rig: Rig, steps: int = 6) -> float:
    """Run random steps: decodes, chunks, and new prompts of one token and more, in any order."""
    running, worst = rig.add(3), rig.run([(0, 5), (1, 37), (2, 1)])
    for _ in range(steps):
        step = [(index, rig.random.choice([1, 1, 1, 9])) for index in running if rig.random.random() < 0.9]
        for index in rig.add(rig.random.choice([0, 0, 1])):
            running.append(index)
            step.append((index, rig.random.choice([1, 20])))
        if rig.random.random() < 0.5:
            rig.random.shuffle(step)
        else:  # as the runner reorders them: decodes, chunks, then prompts
            step.sort(key=lambda one: (one[1] > 1, rig.requests[one[0]].len == 0))
        if step:
            worst = max(worst, rig.run(step[:8], pad_tokens=rig.random.choice([0, 3])))
    return worst


@WALK
@pytest.mark.parametrize(
    "layers",
    [pytest.param(layers, id=name, marks=pytest.mark.feature(*shown)) for name, (layers, *shown) in LAYERS.items()],
)
def test_features_of_layers(layers):
    assert walk(Rig(layers)) < 1e-5


SPANS = {0: [(2, 9), (12, 30)], 1: [(4, 18), (19, 19), (20, 25)], 2: [(0, 6)]}
"""Spans of three requests: some begin before a step, or end behind it."""


@pytest.mark.feature("mm_prefix")
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("windows", [(8,), (None,), (8, None)])
def test_spans(windows, clamped):
    layers = [{"sliding_window": window} if window else {} for window in windows]
    rig = Rig(layers, mm_prefix=True)
    for layer in rig.layers.values():
        layer.mm_prefix_clamp_sliding_window = clamped and layer.impl.sliding_window is not None
    rig.builder = rig.make_builder(list(rig.layers))
    rig.add(3)
    for step in ([(0, 11), (1, 21), (2, 1)], [(0, 9), (1, 3), (2, 9)], [(2, 1), (0, 1), (1, 1)]):
        spans = {number: SPANS[index] for number, (index, _) in enumerate(step)}
        assert rig.run(step, pad_tokens=2, spans=spans) < 1e-5
    assert rig.run([(0, 1), (1, 30)], spans={0: [], 1: []}) < 1e-5


def test_spans_of_microbatches_are_refused():
    with pytest.raises(NotNegotiatedError, match="the metadata of a microbatch"):
        Rig([{}], mm_prefix=True, use_ubatching=True)


@WALK
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("block_size", "kv_heads"), [(16, 2), (8, 1), (32, 4)])
def test_orders_of_memory(order, block_size, kv_heads):
    rig = Rig([{}, {"sliding_window": 24}], order=order, block_size=block_size, num_kv_heads=kv_heads)
    assert walk(rig) < 1e-5


@WALK
@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed):
    assert walk(Rig([{}, {"sliding_window": 12, "logits_soft_cap": 4.0}], seed=seed), steps=12) < 1e-5


@pytest.mark.parametrize("given", [{}, {"sliding_window": 8, "sinks": torch.ones(4)}])
def test_a_builder_before_its_layer(given):
    """As vLLM's own tests make them: the layer is in no model, and was made with another default dtype."""
    rig = Rig([given], dtype=torch.bfloat16)
    layer = rig.layers.pop("layers.0")
    rig.builder = rig.make_builder(["layers.0"])
    assert not rig.builder.parts
    with pytest.raises(NotNegotiatedError, match="a layer that no model has"):
        rig.builder.build_for_cudagraph_capture(rig.dummy(2))
    empty = rig.builder.build(0, rig.dummy(2))
    assert (
        rig.builder.update_block_table(empty, empty.common.block_table_tensor, empty.slot_mapping).late is rig.builder
    )
    layer.impl = impl = rig.make_layer(given, {}).impl
    assert impl.requirements.dtype == "float32"
    rig.layers["layers.0"] = layer
    rig.add(2)
    assert rig.run([(0, 5), (1, 20)]) < 2e-2
    assert rig.run([(0, 1), (1, 1)]) < 2e-2
    assert impl.requirements.dtype == "bfloat16"
    layer.impl = rig.make_layer(given, {}).impl
    with pytest.raises(LayerError, match="metadata of a step"):
        rig.run([(0, 1), (1, 1)])


def test_layers_of_one_agreement_share_a_builder():
    rig = Rig([{}, {"sliding_window": 8}, {}, {"sliding_window": 8}])
    names = [[impl.layer.name for impl in part.builder.impls] for part in rig.builder.parts]
    assert names == [["layers.0", "layers.2"], ["layers.1", "layers.3"]]
    first, second = rig.builder.parts
    assert first.builder.state is second.builder.state


@pytest.mark.feature("mixed batches with one-token prompts last")
def test_a_prompt_of_one_token_behind_a_prefill():
    rig = Rig([{}])
    rig.add(3)
    rig.run([(0, 5)])
    assert rig.run([(0, 1), (1, 30), (2, 1)]) < 1e-5


@pytest.mark.feature("preemption")
def test_a_preempted_request_is_prefilled_again():
    rig = Rig([{}, {"sliding_window": 8}])
    rig.add(2)
    rig.run([(0, 37), (1, 20)])
    former = rig.preempt(0)
    (other,) = rig.add()
    assert rig.run([(1, 1), (other, 40)]) < 1e-5
    assert set(former) & set(rig.requests[other].blocks)
    assert rig.run([(1, 1), (0, 30), (other, 1)]) < 1e-5
    assert rig.run([(0, 8), (1, 1), (other, 1)]) < 1e-5
    assert rig.requests[0].blocks != former


@pytest.mark.feature("prefix caching")
def test_prefix_caching_shares_blocks():
    rig = Rig([{}])
    rig.add(2)
    rig.run([(0, 40)])
    first, second = rig.requests
    second.blocks, second.len = first.blocks[:2], 32
    second.k = {name: keys[:32] for name, keys in first.k.items()}
    second.v = {name: values[:32] for name, values in first.v.items()}
    assert rig.run([(0, 1), (1, 7)]) < 1e-5


def test_a_profiling_run_fills_the_output_with_zeros():
    rig = Rig([{}])
    inputs = rig.inputs(5)
    rig.forward(inputs, None)
    assert not inputs["layers.0"].out.any()


def test_a_dummy_run_writes_nothing():
    rig = Rig([{}])
    rig.add(2)
    rig.run([(0, 5), (1, 20)])
    before = rig.layers["layers.0"].kv_cache.clone()
    common = rig.common([(0, 1), (1, 1)])  # pages of requests that ended may be there still
    common.slot_mapping.fill_(-1)
    rig.forward(rig.inputs(2), rig.builder.build(0, common))
    assert torch.equal(before.view(torch.int8), rig.layers["layers.0"].kv_cache.view(torch.int8))
    rig.forward(rig.inputs(4), rig.builder.build(0, rig.dummy(4)))
    assert rig.run([(0, 1), (1, 1)]) < 1e-5
