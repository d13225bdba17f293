"""Kinds of pools by vLLM's descriptions: which are served, and which are refused before a step."""

from __future__ import annotations

from types import SimpleNamespace as Names

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from attnplug.errors import NotNegotiatedError, RequirementsError
from attnplug_kit.oracle import attend
from attnplug_vllm import selector
from attnplug_vllm.builder import make_builder_class
from hosts.vllm.tests.rig import CHOICE, CPU, Rig

SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("kind", "fields"), [("SinkFullAttentionSpec", {"sink_len": 16}), ("RSWASpec", {"rswa_window": 8})]
)
def test_another_kind_is_refused_by_name(kind, fields):
    rig = Rig([{}])
    rig.layers["layers.0"].impl.binding = None
    rig.spec = getattr(kv_cache_interface, kind)(**SIZES, **fields)
    with pytest.raises(
        NotNegotiatedError, match=rf"(?s)as {kind}.*serves FullAttentionSpec.*leave --attention-backend"
    ):
        rig.make_builder(["layers.0"])


@pytest.mark.parametrize(("window", "reasons"), [(128, 1), (None, 0)])
def test_reference_windows_are_refused_where_the_selector_does_not_say(window, reasons, monkeypatch):
    rig = Rig([{}])
    rig.config.model_config.rswa_window = window
    monkeypatch.setattr(selector.facts, "current_config", lambda: rig.config)
    monkeypatch.setattr(selector.model, "alike", lambda head_size, *, is_windowed: [{}])
    asked = {"head_size": 16, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": None}
    found = selector.validate(asked, CHOICE)
    assert len(found) == reasons
    assert all("R-SWA" in text for text in found)


@pytest.mark.parametrize("dtype", ["int8", "int8_k"])
def test_int8_pages_are_refused_beside_a_connector(dtype):
    section, connector = {"attnplug": {"kv_cache_dtype": dtype}}, Names(is_kv_transfer_instance=True)
    with pytest.raises(RequirementsError, match=rf"(?s)KV connector.*'{dtype}'.*leave --kv-transfer-config out"):
        Rig([{}], additional_config=section, kv_transfer_config=connector)


def test_a_window_may_be_the_kind():
    spec = SlidingWindowSpec(**SIZES, sliding_window=8)
    rig = Rig([{"sliding_window": 8}])
    rig.spec = rig.members.customize_spec(spec) if hasattr(rig.members, "customize_spec") else spec
    rig.builder = rig.make_builder(["layers.0"])
    rig.add(2)
    assert rig.run([(0, 5), (1, 37)]) < 1e-5


def test_blocks_that_a_window_has_left_are_not_read():
    rig = Rig([{"sliding_window": 8}], block_size=4)
    rig.add(1)
    rig.run([(0, 21)])
    for count in (1, 5):
        common = rig.common([(0, count)])
        # vLLM has freed them, and others write there; the null block that replaces them was never written.
        common.block_table_tensor[:, : (rig.requests[0].len - 7) // 4] = 0
        inputs = rig.inputs(count)
        rig.forward(inputs, rig.builder.build(0, common))
        assert rig.check([(0, count)], inputs) < 1e-5


def test_a_prefix_model_attends_to_its_whole_prompt(monkeypatch):
    backend = type("Backend", (), {"get_builder_cls": staticmethod(lambda: make_builder_class(CHOICE))})
    made = create_encoder_only_attention_backend.__wrapped__(backend).get_builder_cls()
    rig = Rig([{}], described={"non_causal": True})
    rig.builder = made(rig.spec, list(rig.layers), rig.config, CPU)
    rig.add(2)
    monkeypatch.setattr(rig, "expected", lambda layer, *qkv: attend(*qkv[:3], scale=0.25, causal=False).output)
    for step in ([(0, 5), (1, 19)], [(0, 1), (1, 1)]):
        common, inputs = rig.common(step), rig.inputs(sum(count for _, count in step))
        rig.forward(inputs, rig.builder.build(0, common))
        assert rig.check(step, inputs) < 1e-5
