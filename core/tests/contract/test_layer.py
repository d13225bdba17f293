from __future__ import annotations

import attrs
import pytest
import torch

from attnplug.contract import Layer
from attnplug.errors import LayerError, NotNegotiatedError, TensorError
from attnplug.request import FIELDS
from core.tests.contract.world import make_backend, make_layer, refused

HEADS = 4


def test_a_layer_inherits_what_was_agreed():
    backend = make_backend(
        head_size_v=16, sliding_window=5, logits_soft_cap=30.0, attention_chunk=8, block_sparse={"stride": 2}
    )

    layer = make_layer(backend).layer

    assert (layer.num_q_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v) == (4, 2, 8, 16)
    assert (layer.sliding_window, layer.window) == (5, (4, 0))
    assert (layer.logits_soft_cap, layer.attention_chunk, layer.attn_type) == (30.0, 8, "decoder")
    assert layer.block_sparse == (("stride", 2),)
    assert layer.scale == 8**-0.5


def test_every_inherited_field_is_in_a_layer():
    inherited = {item.name for item in FIELDS.values() if item.in_layer}

    assert inherited <= {item.name for item in attrs.fields(Layer)}


def test_a_layer_may_repeat_what_was_agreed():
    backend = make_backend(sliding_window=5, block_sparse={"stride": 2, "block": 64})

    impl = make_layer(
        backend, num_q_heads=4, sliding_window=5, scale=2, block_sparse={"block": 64, "stride": 2}, attn_type="decoder"
    )

    assert (impl.scale, impl.window, impl.wrapped.num_queries_per_kv) == (2.0, (4, 0), 2)


@pytest.mark.parametrize(
    ("requested", "window"),
    [
        ({}, (-1, -1)),
        ({"sliding_window": 1}, (0, 0)),
        ({"sliding_window": 4, "attn_type": "encoder_only"}, (3, 3)),
        ({"sliding_window": 4, "attn_type": "encoder"}, (3, 0)),
    ],
)
def test_a_published_window_counts_the_token_itself(requested, window):
    assert make_layer(make_backend(**requested)).window == window


@pytest.mark.parametrize(
    ("field", "value", "requested"),
    [
        ("num_q_heads", 8, {}),
        ("num_kv_heads", 1, {}),
        ("head_size", 16, {}),
        ("head_size_v", 4, {}),
        ("sliding_window", 128, {}),
        ("sliding_window", 128, {"sliding_window": 64}),
        ("attention_chunk", 16, {}),
        ("logits_soft_cap", 50.0, {}),
        ("attn_type", "encoder_only", {}),
        ("block_sparse", {"stride": 3}, {"block_sparse": {"stride": 2}}),
    ],
)
def test_a_value_that_was_not_negotiated_is_refused(field, value, requested):
    backend = make_backend(**requested)
    agreed = getattr(backend.agreement.requirements, field)

    with refused(
        NotNegotiatedError,
        problem=f"'layers.0' has {field}=",
        expected=f"{field}={agreed!r} was negotiated" if agreed is not None else f"{field} was not requested",
        fix="select again with",
    ):
        make_layer(backend, **{field: value})


@pytest.mark.parametrize(
    ("field", "requested", "tensor"),
    [
        ("sinks", {"sinks": True}, torch.zeros(HEADS)),
        ("alibi_slopes", {"alibi": "linear"}, torch.zeros(HEADS)),
        ("output_scale", {"output_quant": "fp8_e4m3"}, torch.ones(1)),
    ],
)
def test_a_learned_tensor_is_there_exactly_where_requested(field, requested, tensor):
    assert getattr(make_layer(make_backend(**requested), **{field: tensor}).layer, field) is tensor
    with refused(LayerError, problem=f"no {field}", expected="was requested", fix="select again without"):
        make_layer(make_backend(**requested))
    with refused(NotNegotiatedError, problem=f"has {field} of", expected="was not requested", fix="select again with"):
        make_layer(make_backend(), **{field: tensor})


@pytest.mark.parametrize(
    "sinks",
    [torch.zeros(3), torch.zeros(1, HEADS), torch.zeros(HEADS, dtype=torch.float16), torch.zeros(HEADS, device="meta")],
)
def test_sinks_have_one_shape_and_device(sinks):
    with refused(TensorError, problem="sinks of", expected="(4,) float32 or bfloat16 on cpu", fix="sinks.to("):
        make_layer(make_backend(sinks=True, dtype="bfloat16"), sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_come_in_float32_or_the_layers_dtype(dtype):
    sinks = torch.zeros(HEADS, dtype=dtype)

    assert make_layer(make_backend(sinks=True, dtype="bfloat16"), sinks=sinks).layer.sinks is sinks


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_learned_values_are_finite(value):
    tensor = torch.tensor([0.0, value, 0.0, 0.0])

    with refused(LayerError, problem="not finite", fix="-1e4"):
        make_layer(make_backend(sinks=True), sinks=tensor)
    with refused(LayerError, problem="not finite", fix="slope 0"):
        make_layer(make_backend(alibi="sqrt"), alibi_slopes=tensor)


@pytest.mark.parametrize("shape", [(2,), (1, 1)])
def test_an_output_scale_is_one_element(shape):
    with refused(TensorError, problem="output_scale of"):
        make_layer(make_backend(output_quant="fp8_e4m3"), output_scale=torch.ones(shape))


def test_a_block_scale_needs_a_quantized_output():
    with refused(NotNegotiatedError, problem="output_block_scale", fix="output_quant"):
        make_layer(make_backend(), output_block_scale=torch.ones(4))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
def test_a_scale_is_a_positive_number(scale):
    with refused(LayerError, problem=f"scale={scale!r}", fix="leave it out"):
        make_layer(make_backend(), scale=scale)


def test_a_shared_cache_was_negotiated():
    assert make_layer(make_backend(kv_sharing=True), kv_sharing_target="layers.9").layer.kv_sharing_target == "layers.9"
    with refused(NotNegotiatedError, problem="reads the cache of 'layers.9'", expected="kv_sharing was not requested"):
        make_layer(make_backend(), kv_sharing_target="layers.9")
    with refused(LayerError, problem="shares the cache of itself"):
        make_layer(make_backend(kv_sharing=True), kv_sharing_target="layers.0")


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_layer_has_a_name(name):
    with refused(LayerError, problem=f"named {name!r}"):
        make_backend().make_impl(Layer(name=name))


@pytest.mark.parametrize("pattern", [3, "xy", [1]])
def test_a_pattern_is_a_table(pattern):
    with refused(LayerError, problem=f"block_sparse={pattern!r}"):
        Layer(name="layers.0", block_sparse=pattern)


def test_refusing_leaves_the_layer_as_it_was():
    layer = Layer(name="layers.0", sliding_window=3)

    with refused(NotNegotiatedError):
        make_backend().make_impl(layer)

    assert (layer.num_q_heads, layer.scale, layer.sliding_window) == (None, None, 3)
