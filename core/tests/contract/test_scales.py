from __future__ import annotations

import pytest
import torch

from attnplug.errors import LayerError, NotNegotiatedError, PluginContractError, TensorError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import make_backend, make_layer, refused


class ScalingImpl(ToyImpl):
    static_scales = frozenset("kv")


class ScalingBackend(ToyBackend):
    impl_class = ScalingImpl


def fp8(**requested):
    return make_backend(ScalingBackend, kv_cache_dtype="fp8_e4m3", **requested)


def test_scales_default_to_one_on_host_and_device():
    layer = make_layer(fp8()).layer

    assert (layer.q_scale, layer.k_scale, layer.v_scale) == (1.0, 1.0, 1.0)
    assert layer.q_scale_tensor is None
    assert torch.equal(layer.k_scale_tensor, torch.ones(1))


def test_the_host_float_and_the_tensor_follow_from_each_other():
    layer = make_layer(fp8(), k_scale=0.5, v_scale_tensor=torch.tensor(0.25)).layer

    assert torch.equal(layer.k_scale_tensor, torch.tensor([0.5]))
    assert layer.v_scale == 0.25


def test_equal_float_and_tensor_are_one_scale():
    assert make_layer(fp8(), k_scale=0.1, k_scale_tensor=torch.tensor([0.1])).layer.k_scale == pytest.approx(0.1)
    with refused(LayerError, problem="k_scale=0.1 and k_scale_tensor=0.5", fix="pass one"):
        make_layer(fp8(), k_scale=0.1, k_scale_tensor=torch.tensor([0.5]))


def test_scales_per_head_are_tensors():
    heads = torch.tensor([0.5, 0.25])
    backend = fp8(per_head_scales=True)

    layer = make_layer(backend, k_scale_tensor=heads, v_scale_tensor=heads).layer

    assert layer.k_scale is None
    assert layer.k_scale_tensor is heads
    with refused(LayerError, problem="k_scale=0.5 and a tensor too", fix="k_scale_tensor of (2,) alone"):
        make_layer(backend, k_scale=0.5, k_scale_tensor=heads)
    with refused(LayerError, problem="k_scale=None and no tensor", expected="per_head_scales was requested"):
        make_layer(backend)
    with refused(LayerError, problem="v_scale_tensor=-1.0"):
        make_layer(backend, k_scale_tensor=heads, v_scale_tensor=torch.tensor([1.0, -1.0]))
    with refused(TensorError, problem="k_scale_tensor of (2,)", fix="per_head_scales=True"):
        make_layer(fp8(), k_scale_tensor=heads)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2), torch.ones(1, 1), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta")],
)
def test_a_scale_tensor_has_one_form(tensor):
    with refused(TensorError, problem="v_scale_tensor of", expected="float32 on cpu"):
        make_layer(fp8(), v_scale_tensor=tensor)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_positive(value):
    with refused(LayerError, problem="k_scale="):
        make_layer(fp8(), k_scale=value)
    with refused(LayerError, problem="k_scale_tensor="):
        make_layer(fp8(), k_scale_tensor=torch.tensor([value]))


@pytest.mark.parametrize("scale", [{"k_scale": 0.5}, {"k_scale_tensor": torch.tensor([1.0])}])
def test_a_scale_without_effect_is_refused(scale):
    (name,) = scale
    with refused(NotNegotiatedError, problem=name, expected="takes no scales", fix="kv_cache_dtype"):
        make_layer(make_backend(ScalingBackend), **scale)
    with refused(NotNegotiatedError, problem=name, expected="toy/plain applies no static k_scale to a fp8_e4m3 cache"):
        make_layer(make_backend(kv_cache_dtype="fp8_e4m3"), **scale)


@pytest.mark.parametrize(
    ("dtype", "codes"), [("int8_per_token_head", torch.int8), ("fp8_per_token_head", torch.float8_e4m3fn)]
)
def test_scales_per_token_are_of_the_kv_cache(dtype, codes):
    backend = make_backend(ScalingBackend, kv_cache_dtype=dtype)
    requested = backend.agreement.requirements

    cache = backend.make_cache(3)

    shape = (3, requested.num_kv_heads, backend.agreement.block_size)
    assert (cache.k.dtype, cache.v.dtype) == (codes, codes)
    for role in ("k_scale", "v_scale"):
        assert (cache[role].dtype, tuple(cache[role].shape)) == (torch.float32, shape)
        assert cache.spec.tensors[role].block_axis == 0
    assert make_layer(backend).layer.k_scale_tensor is None
    with refused(NotNegotiatedError, problem="k_scale=0.5", expected="each cache write computes", fix="leave k_scale"):
        make_layer(backend, k_scale=0.5)


def test_scales_without_values_pass_as_they_are():
    tensor, heads = torch.ones(1, device="meta"), torch.ones(2, device="meta")

    assert make_layer(fp8(device="meta"), k_scale_tensor=tensor).layer.k_scale_tensor is tensor
    per_head = make_layer(fp8(device="meta", per_head_scales=True), k_scale_tensor=heads, v_scale_tensor=heads)
    assert per_head.layer.k_scale_tensor is heads


def test_a_scale_of_one_needs_no_cache_that_scales():
    assert make_layer(make_backend(), k_scale=1.0, q_scale=1.0).layer.k_scale == 1.0


@pytest.mark.parametrize("quantizes", [{"static_scales": frozenset("qkv")}, {"query_quantization": "host"}])
def test_a_class_that_quantizes_queries_is_refused_where_they_stay_as_they_are(quantizes):
    kind = type("Quantizing", (ToyBackend,), {"impl_class": type("Impl", (ToyImpl,), quantizes)})

    make_layer(make_backend(kind, unquantized_queries=True))
    make_layer(make_backend(kind, kv_cache_dtype="fp8_e4m3"))
    make_layer(fp8(unquantized_queries=True))
    with refused(PluginContractError, problem="Impl quantizes queries", fix="refuse it in the manifest, by a rule"):
        make_layer(make_backend(kind, kv_cache_dtype="fp8_e4m3", unquantized_queries=True))


NOT_NORMAL = [0, 0.0, -1.0, 1e-46, 1e-39, 5e-324, 3.5e38, 10**400, float("inf"), float("nan"), True, "1"]


@pytest.mark.parametrize("value", NOT_NORMAL, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("name", ["k_scale", "v_scale", "scale"])
def test_scales_are_normal_float32_numbers(name, value):
    with refused(LayerError, problem=f"has {name}=", expected="normal in float32"):
        make_layer(fp8(), **{name: value})
    assert getattr(make_layer(fp8(), **{name: 2.0**-126}).layer, name) == 2.0**-126


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-39, float("inf"), float("nan")])
def test_scales_on_the_device_are_normal_too(value):
    tensor = torch.tensor([value])

    with refused(LayerError, problem="k_scale_tensor=", expected="normal in float32"):
        make_layer(fp8(), k_scale_tensor=tensor)
    with refused(LayerError, problem="v_scale_tensor=", expected="normal in float32"):
        make_layer(fp8(per_head_scales=True), k_scale_tensor=torch.ones(2), v_scale_tensor=tensor.repeat(2))
    with refused(LayerError, problem="output_scale"):
        make_layer(make_backend(output_quant="fp8_e4m3"), output_scale=tensor)
