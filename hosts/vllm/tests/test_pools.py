"""Pools of vLLM as KV caches: forms, orders of memory, 8-bit floats and their scales, and what is refused at start."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch

from attnplug.errors import AttnplugError, CacheError, LayerError, NotNegotiatedError
from attnplug_kit.oracle import attend
from attnplug_vllm import cache
from hosts.vllm.tests.rig import CHOICE, HAS_LAYOUTS, ORDERS, Rig, make_pool, members_of

FORMS = [(form, kv_layout) for form in cache.FORMS for kv_layout in ("NHD", "HND")]


@pytest.fixture(params=FORMS, ids="-".join)
def form(request, monkeypatch):
    """Let backends take one form and one layout only."""
    wanted = request.param
    reasons = cache.facts.reasons

    def only(requirements, choice):
        asked = (requirements.kv_cache_form, requirements.kv_layout)
        return reasons(requirements, choice) if asked in (wanted, (None, None)) else ["another form"]

    monkeypatch.setattr(cache.facts, "reasons", only)
    return wanted


def test_every_form_is_served(form):
    rig = Rig([{}, {"sliding_window": 8}], order=None if HAS_LAYOUTS else form[1], block_size=8)
    agreement = rig.builder.parts[0].backend.agreement
    assert (agreement.kv_cache_form, agreement.kv_layout) == form
    rig.add(3)
    for step in ([(0, 5), (1, 37), (2, 1)], [(0, 1), (1, 3), (2, 1)], [(0, 1), (1, 1)]):
        assert rig.run(step) < 1e-5


@pytest.mark.skipif(not HAS_LAYOUTS, reason="vLLM names no orders of memory before 0.32")
def test_orders_of_memory_are_named_by_preference():
    rig = Rig([{}])
    names = [layout.name for layout in rig.members.supported_kv_cache_layouts()]
    assert names == list(ORDERS) == ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]
    assert rig.members.customize_spec(rig.spec) is rig.spec


@pytest.mark.skipif(HAS_LAYOUTS, reason="vLLM names orders of memory since 0.32")
def test_layers_inside_of_blocks_before_orders_had_names():
    rig = Rig([{}], order="HND")
    assert rig.members.get_kv_cache_stride_order() == (0, 1, 2, 3)
    assert rig.members.get_kv_cache_stride_order(include_num_layers_dimension=True) == (1, 0, 2, 3, 4)
    with_layers = torch.empty(5, 3, 2, 16, 32).permute(1, 0, 2, 3, 4)  # blocks, layers, heads, tokens, content
    impl = rig.layers["layers.0"].impl
    assert cache.bind_pool(with_layers[1], impl.binding.backend).num_blocks == 5


@pytest.mark.parametrize(("served", "required"), [(("HND",), "HND"), (("NHD",), "NHD"), (("NHD", "HND"), None)])
def test_the_only_layout_that_is_served_is_required(monkeypatch, served, required):
    monkeypatch.setattr(cache.facts, "serves", lambda choice, *, kv_layout: kv_layout in served)
    assert members_of(CHOICE).get_required_kv_cache_layout() == required


def test_an_order_that_no_layer_takes_is_refused_at_start():
    refused = "LHBNC" if HAS_LAYOUTS else "other"
    with pytest.raises(CacheError, match=rf"lays its KV cache out as {refused}(?s:.*)set VLLM_KV_CACHE_LAYOUT="):
        Rig([{}], order=refused)


def test_a_pool_of_other_heads_is_refused_at_start(monkeypatch):
    rig = Rig([{}])
    spec = type(rig.spec)(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    rig.layers["layers.0"].impl.binding = None
    rig.spec = spec
    with pytest.raises(CacheError, match=r"KV cache|cache tensor"):
        rig.make_builder(["layers.0"])


def test_a_pool_of_another_order_than_resolved_is_refused():
    rig = Rig([{}], order=ORDERS[0])
    rig.layers["layers.0"].kv_cache = rig.layers["layers.0"].kv_cache.contiguous()  # heads before tokens
    rig.add(1)
    with pytest.raises(CacheError, match="strides"):
        rig.run([(0, 5)])


def test_a_step_without_a_pool_is_refused():
    rig = Rig([{}])
    rig.layers["layers.0"].kv_cache = torch.tensor([])
    rig.add(1)
    with pytest.raises(CacheError, match="no KV cache"):
        rig.run([(0, 5)])


def test_another_pool_is_bound_anew():
    rig = Rig([{}])
    rig.add(2)
    rig.run([(0, 5)])
    rig.layers["layers.0"].kv_cache = rig.layers["layers.0"].kv_cache.clone()
    assert rig.run([(0, 1), (1, 4)]) < 1e-5


def test_a_pool_lives_no_longer_than_its_builder():
    rig = Rig([{}])
    rig.add(1)
    rig.run([(0, 5)])
    (layer,) = rig.layers.values()
    pool, layer.kv_cache = ref(layer.kv_cache.untyped_storage()), torch.tensor([])
    assert pool() is not None
    rig.builder = None  # as vLLM drops its runner, and keeps the model
    gc.collect()
    assert layer.impl._cache is None
    assert layer.impl.shared is None
    assert pool() is None


def test_a_layer_of_another_builder_binds_its_pool_again():
    rig = Rig([{}])
    rig.add(1)
    rig.run([(0, 5)])
    former, rig.builder = rig.builder, rig.make_builder(["layers.0"])
    rig.run([(0, 1)])
    del former
    gc.collect()
    assert rig.run([(0, 1)]) < 1e-5


@pytest.mark.parametrize("microbatches", [1, 2])
def test_nothing_that_sleep_discards_is_read(microbatches):
    slopes = [0.5, 0.25, 0.125, 0.0625]
    rig = Rig([{"alibi_slopes": slopes, "sinks": torch.ones(4)}] * 2, enable_cumem_allocator=True)
    builders = [rig.builder, *(rig.make_builder(list(rig.layers)) for _ in range(microbatches - 1))]
    made = [layer.impl.binding.attn for layer in rig.layers.values()]
    rig.add(2)
    for rig.builder in builders:  # before vLLM serves, it runs a step of each
        rig.run([(0, 5), (1, 19)])
    for attn in made:  # as vLLM 0.26 discards what was allocated beside its pools
        attn.layer.alibi_slopes.fill_(float("nan"))
    for rig.builder in builders:
        assert rig.run([(0, 1), (1, 3)]) < 1e-5
    assert all(layer.impl.binding.attn not in made for layer in rig.layers.values())


def test_forms_of_no_layer_are_refused(monkeypatch):
    rig = Rig([{}])
    monkeypatch.setattr(cache.facts, "reasons", lambda requirements, choice: ["no"])
    with pytest.raises(CacheError, match="the layers of torch/sdpa share no form"):
        members_of(CHOICE).customize_spec(rig.spec) if HAS_LAYOUTS else make_pool(rig.spec, None, rig.members)


SCALES = {"k": torch.tensor(0.03), "v": torch.tensor(0.02)}


def rounded(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = scale.reshape(-1, 1) if scale.numel() > 1 else scale
    return (values / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float() * scale


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)],
)
@pytest.mark.parametrize(
    "per_head",
    [
        pytest.param(False, marks=pytest.mark.feature("FP8 KV cache, scales per tensor")),
        pytest.param(True, marks=pytest.mark.feature("FP8 KV cache, scales per head")),
    ],
)
def test_8_bit_floats_have_the_scales_of_the_layer(name, dtype, per_head):
    scales = SCALES if not per_head else {"k": torch.tensor([0.03, 0.01]), "v": torch.tensor([0.02, 0.05])}
    rig = Rig([{}], kv_cache_dtype=name, scales=scales)
    assert rig.layers["layers.0"].impl.binding.backend.agreement.requirements.per_head_scales is per_head
    check_quantized(rig, scales, dtype)


def check_quantized(rig, scales, dtype):
    """Compare a prefill and a decode with the oracle over rounded keys and values."""
    (request,) = rig.add(1)
    keys, values = torch.empty(0, 2, 16), torch.empty(0, 2, 16)
    for count in (5, 1):
        common, io = rig.common([(request, count)]), rig.inputs(count)
        rig.forward(io, rig.builder.build(0, common))
        keys = torch.cat([keys, rounded(io["layers.0"].k, scales["k"], dtype)])
        values = torch.cat([values, rounded(io["layers.0"].v, scales["v"], dtype)])
        expected = attend(io["layers.0"].q, keys, values, scale=0.25).output
        assert float((io["layers.0"].out.double() - expected).abs().max()) < 1e-5
        rig.requests[request].len += count


@pytest.mark.feature("FP8 KV cache, scales per tensor")
def test_scales_that_are_known_after_loading_are_taken_over():
    scales = {"k": torch.tensor(1.0), "v": torch.tensor(1.0)}
    rig = Rig([{}], kv_cache_dtype="fp8", scales=scales)
    for letter in "kv":
        scales[letter].copy_(SCALES[letter])
    rig.layers["layers.0"].impl.process_weights_after_loading(torch.float32)
    check_quantized(rig, SCALES, torch.float8_e4m3fn)


@pytest.mark.feature("FP8 KV cache, scales per tensor")
def test_scales_that_come_as_other_tensors_are_taken_over():
    rig = Rig([{}], kv_cache_dtype="fp8")
    layer = rig.layers["layers.0"]
    layer._k_scale, layer._v_scale = SCALES["k"], SCALES["v"]
    layer.impl.process_weights_after_loading(torch.float32)
    check_quantized(rig, SCALES, torch.float8_e4m3fn)


def test_a_scale_that_is_no_number_is_refused_at_start():
    with pytest.raises(LayerError, match="k_scale_tensor"):
        Rig([{}], kv_cache_dtype="fp8", scales={"k": torch.tensor(float("nan"))})


def test_scales_of_the_first_step_are_refused_by_name():
    with pytest.raises(NotNegotiatedError, match="calculate_kv_scales"):
        Rig([{}], kv_cache_dtype="fp8", calculate_kv_scales=True)


def test_layers_that_leave_quantization_out_are_beside_others():
    with pytest.raises(AttnplugError, match=r"KV cache|cache tensor"):  # they have no spec of their own here
        Rig([{}, {"kv_cache_dtype": "auto"}], kv_cache_dtype="fp8")
