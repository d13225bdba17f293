"""What a layer passes to each call, and which tensors it does not write."""

from __future__ import annotations

import pytest
import torch

from attnplug.contract import Batch, Layer, split_kv
from attnplug.errors import LayerError
from plugins.flash_attn.tests.recording_kernels import load
from tests.backends.caches import copy_of, is_clear, same
from tests.backends.harness import Harness

FP8 = torch.float8_e4m3fn


def run(harness: Harness, query_lens: list[int], seq_lens: list[int], **tensors):
    """Run a step; the call's tensors may be given."""
    batch = harness.batch(query_lens, seq_lens)
    tokens, impl = batch.num_actual_tokens, harness.impls[0]
    given = {
        "query": torch.randn(tokens, 4, 64).bfloat16(),
        "key": torch.randn(tokens, 2, 64).bfloat16(),
        "value": torch.randn(tokens, 2, 64).bfloat16(),
        "kv_cache": harness.backend.make_cache(16),
        "output": torch.empty(tokens, 256).bfloat16(),
        **tensors,
    }
    impl.forward(**given, metadata=harness.builder.build(batch))
    return given, harness.backend.wrapped.kernels.calls


def test_a_profiling_run_leaves_the_output_alone() -> None:
    harness = Harness(load)
    query, keys = torch.randn(3, 4, 64).bfloat16(), torch.randn(3, 2, 64).bfloat16()
    output = torch.full((3, 256), 7.0).bfloat16()
    harness.impls[0].forward(query, keys, keys, None, None, output)

    assert bool((output == 7.0).all())
    assert not harness.backend.wrapped.kernels.calls


def test_kernels_write_the_output_and_the_lse_in_place() -> None:
    harness = Harness(load, return_lse=True)
    wide = torch.full((6, 300), 7.0).bfloat16()
    lse = torch.full((6, 4), 7.0)
    given, calls = run(harness, [1, 4], [9, 4], output=wide[:5, 20:276], lse=lse[:5])
    exact = torch.empty(5, 256).bfloat16()
    run(harness, [1, 4], [9, 4], **{**given, "output": exact, "lse": None})

    assert torch.equal(wide[:5, 20:276], exact)
    assert bool((wide[:, :20] == 7.0).all())
    assert bool((wide[:, 276:] == 7.0).all())
    assert bool((wide[5:] == 7.0).all())
    assert [one.lse.data_ptr() for one in calls[:2]] == [lse.data_ptr(), lse[1:].data_ptr()]
    assert bool((lse[5] == 7.0).all())


def test_slopes_and_sinks_have_the_dtypes_of_the_kernels() -> None:
    layer = Layer(name="layers.0", sinks=torch.randn(4), alibi_slopes=torch.rand(8)[::2])
    impl = Harness(load, [layer], sinks=True, alibi="linear").impls[0]

    assert impl.wrapped.params.sinks.dtype == torch.bfloat16
    assert impl.wrapped.params.alibi_slopes.dtype == torch.float32
    assert impl.wrapped.params.alibi_slopes.is_contiguous()
    assert impl.wrapped.params_without_sinks.sinks is None
    assert impl.wrapped.params_without_sinks.alibi_slopes is impl.wrapped.params.alibi_slopes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainable_sinks_are_detached(dtype) -> None:
    """For tensors that require grad, FlashAttention 4 compiles other kernels, and computes an unused LSE."""
    sinks = torch.nn.Parameter(torch.randn(4).to(dtype))
    impl = Harness(load, [Layer(name="layers.0", sinks=sinks)], sinks=True).impls[0]

    assert not impl.wrapped.params.sinks.requires_grad
    assert torch.equal(impl.wrapped.params.sinks, sinks.to(torch.bfloat16))


def test_no_soft_cap_is_zero() -> None:
    assert Harness(load).impls[0].wrapped.params.softcap == 0.0
    assert Harness(load, logits_soft_cap=30.0).impls[0].wrapped.params.softcap == 30.0


def test_queries_are_quantized_by_their_scale() -> None:
    layer = Layer(name="layers.0", q_scale=0.5, k_scale=0.25, v_scale=2.0)
    harness = Harness(load, [layer], kv_cache_dtype="fp8_e4m3")
    query = (torch.arange(4 * 64).view(1, 4, 64) / 16).bfloat16()
    _, (recorded,) = run(harness, [1], [5], query=query)

    assert recorded.query_dtype == FP8
    assert [
        float(scale) for scale in (recorded.params.q_descale, recorded.params.k_descale, recorded.params.v_descale)
    ] == [
        0.5,
        0.25,
        2.0,
    ]


def test_scales_per_head_come_with_each_call() -> None:
    scales = {f"{letter}_scale_tensor": torch.tensor([0.5, 4.0]) for letter in "qkv"}
    harness = Harness(load, [Layer(name="layers.0", **scales)], kv_cache_dtype="fp8_e4m3", per_head_scales=True)
    _, (recorded,) = run(harness, [1], [5])

    assert all(
        torch.equal(scale, torch.tensor([0.5, 4.0])) for scale in (recorded.params.q_descale, recorded.params.k_descale)
    )


def test_a_changed_scale_takes_effect() -> None:
    scale = torch.ones(1)
    impl = Harness(load, [Layer(name="layers.0", k_scale_tensor=scale)], kv_cache_dtype="fp8_e4m3").impls[0]
    scale.fill_(3.0)

    assert float(impl.wrapped.params.k_descale) == 3.0


@pytest.mark.parametrize("writer", ["forward", "host"])
def test_either_writes_the_cache(writer) -> None:
    harness = Harness(load, [Layer(name="layers.0", cache_write=writer)])
    cache, batch = harness.backend.make_cache(16), harness.batch([2], [5])
    query, keys = torch.randn(2, 4, 64).bfloat16(), torch.randn(2, 2, 64).bfloat16()
    impl, output = harness.impls[0], torch.empty(2, 256).bfloat16()
    if writer == "host":
        impl.write_kv(keys, keys, cache, batch.slot_mapping)
        written = copy_of(harness.backend, cache)
    impl.forward(query, keys, keys, cache, harness.builder.build(batch), output)

    assert torch.equal(cache.k[1, 3:5], keys)
    assert torch.equal(cache.v[1, 3:5], keys)
    if writer == "host":
        assert same(cache, written)


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_layer_that_shares_a_kv_cache_does_not_write(has_keys) -> None:
    harness = Harness(load, [Layer(name="layers.1", kv_sharing_target="layers.0")], kv_sharing=True)
    keys = torch.randn(2, 2, 64).bfloat16() if has_keys else None
    given, _ = run(harness, [2], [5], key=keys, value=keys)

    assert is_clear(given["kv_cache"])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_all_layers_in_one_tensor_are_blocks_first(layout) -> None:
    harness = Harness(load, kv_layout=layout, kv_cache_form="interleaved")
    inner = (16, 2) if layout == "NHD" else (2, 16)
    layers = torch.zeros(6, 3, 2, *inner, 64).bfloat16()  # a block holds what all layers have for it

    cache = harness.backend.bind_cache(split_kv(layers[:, 1], "interleaved", layout, 64))
    run(harness, [1, 4], [9, 4], kv_cache=cache)

    assert layers[:, 1].any()
    assert not layers[:, ::2].any()


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_layer_that_shares_a_kv_cache_refuses_row_metadata(has_keys) -> None:
    harness = Harness(load, kv_sharing=True)
    stranger = harness.backend.make_impl(Layer(name="layers.1", kv_sharing_target="layers.0"))
    metadata, query = harness.builder.build(harness.batch([3], [3])), torch.randn(3, 4, 64).bfloat16()
    keys = torch.randn(3, 2, 64).bfloat16() if has_keys else None

    with pytest.raises(LayerError, match="ran with metadata of prefills"):
        stranger.forward(query, keys, keys, harness.backend.make_cache(4), metadata, torch.empty(3, 256).bfloat16())


def test_key_rows_beyond_the_batch_are_not_passed_to_kernels() -> None:
    harness = Harness(load, paged=False, block_size=None)
    query, keys = torch.randn(4, 4, 64).bfloat16(), torch.randn(9, 2, 64).bfloat16()
    output = torch.full((4, 256), 7.0).bfloat16()
    harness.impls[0].forward(query, keys, keys, None, harness.builder.build(Batch.from_lengths([3], [7])), output)

    (recorded,) = harness.backend.wrapped.kernels.calls
    assert recorded.key.shape[0] == 7
    assert bool((output[3] == 7.0).all())
