from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import CacheTensor
from attnplug.errors import CacheError, PluginContractError
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import make_backend, refused


def test_the_default_cache_has_keys_and_values():
    specs = make_backend(head_size_v=16).cache_tensors(5)

    assert {role: (spec.shape, spec.dtype, spec.block_axis) for role, spec in specs.items()} == {
        "k": ((5, 4, 2, 8), torch.float32, 0),
        "v": ((5, 4, 2, 16), torch.float32, 0),
    }


@pytest.mark.parametrize(("dtype", "bytes_each"), [("auto", 4), ("bfloat16", 2), ("fp8_e4m3", 1), ("int8", 1)])
def test_a_block_has_its_bytes(dtype, bytes_each):
    assert make_backend(kv_cache_dtype=dtype).bytes_per_block == 2 * 4 * 2 * 8 * bytes_each


def test_values_of_another_size_count_their_own_bytes():
    assert make_backend(head_size_v=16).bytes_per_block == 4 * 2 * (8 + 16) * 4


def test_a_dense_agreement_has_no_cache():
    backend = make_backend(paged=False)

    assert (backend.cache_tensors(5), backend.bytes_per_block) == ({}, 0)
    with refused(CacheError, problem="a KV cache of 5 blocks", expected="paged=False", fix="kv_cache=None"):
        backend.make_cache(5)


@pytest.mark.parametrize("num_blocks", [1, 0, -3, 2.0, True])
def test_a_cache_has_a_block_beside_the_null_block(num_blocks):
    with refused(CacheError, problem=f"a KV cache of {num_blocks} blocks", expected="block 0", fix="bytes_per_block"):
        make_backend().make_cache(num_blocks)


def test_a_cache_may_live_elsewhere():
    assert make_backend().make_cache(2, device="meta").device.type == "meta"
    assert make_backend(device="meta").make_cache(2).device.type == "meta"


def test_mixed_formats_are_laid_out_by_their_plugin():
    with pytest.raises(PluginContractError, match="cache_tensors"):
        make_backend(kv_cache_dtype="int8_k").cache_tensors(2)


class Int8Backend(ToyBackend):
    """Two quantized tensors, a scale per token that moves with its block, and one that belongs to no block."""

    def cache_tensors(self, num_blocks):
        return {
            "k": CacheTensor((num_blocks, 4, 2, 8), torch.int8, 0),
            "v": CacheTensor((num_blocks, 4, 2, 8), torch.int8, 0),
            "k_scale": CacheTensor((num_blocks, 2, 4), torch.float32, 0, fill=1.0),
            "v_scale": CacheTensor((2, 8), torch.float32, None, fill=0.5),
        }


def test_bytes_per_block_leave_out_what_has_no_blocks():
    assert make_backend(Int8Backend).bytes_per_block == 2 * 2 * 4 * 8 + 2 * 4 * 4


def test_a_fresh_tensor_has_its_fill():
    cache = make_backend(Int8Backend).make_cache(3)

    assert cache["k_scale"].eq(1).all()
    assert cache["v_scale"].eq(0.5).all()
    assert cache["k"].dtype == torch.int8


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.uint8, torch.float64])
def test_any_dtype_is_filled(dtype):
    assert CacheTensor((2, 3), dtype, 0, fill=2.0).allocate("cpu").double().eq(2).all()


orders = st.integers(1, 4).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.just(n)))


@given(orders, st.data())
def test_a_tensor_lies_in_its_stride_order(order, data):
    axes, count = order
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)))
    block_axis = data.draw(st.integers(0, count - 1))
    padding = 0 if axes[-1] == block_axis else data.draw(st.integers(0, 3))
    spec = CacheTensor(shape, torch.float32, block_axis, tuple(axes), block_padding=padding)

    tensor = spec.allocate("cpu")

    assert tensor.shape == shape
    assert spec.nbytes == tensor.untyped_storage().nbytes()
    strides = [tensor.stride(axis) for axis in axes]
    assert strides == sorted(strides, reverse=True)
    assert spec.is_ordered(tensor)
    tensor.copy_(torch.arange(tensor.numel()).reshape(shape))
    assert tensor.unique().numel() == tensor.numel()  # no two elements share a place


def test_padding_makes_pages_equal():
    spec = CacheTensor((5, 4, 8), torch.float32, 0, block_padding=32)

    assert spec.nbytes == 5 * (32 + 32) * 4
    assert spec.allocate("cpu").stride() == (64, 8, 1)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"stride_order": (0, 1)}, "stride_order=(0, 1)"),
        ({"stride_order": (0, 1, 1)}, "stride_order=(0, 1, 1)"),
        ({"block_axis": 3}, "block_axis=3"),
        ({"block_axis": -1}, "block_axis=-1"),
        ({"block_padding": -1}, "block_padding=-1"),
        ({"block_axis": None, "block_padding": 4}, "block_padding=4"),
        ({"block_axis": 2, "block_padding": 4}, "block_padding=4"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(fields, given):
    with pytest.raises(PluginContractError) as caught:
        CacheTensor(**{"shape": (5, 4, 8), "dtype": torch.float32, "block_axis": 0, **fields})

    assert given in caught.value.problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_a_tensor_lies_over_memory_of_the_host(dtype):
    spec = CacheTensor((2, 3, 4, 2, 8), dtype, 1, (0, 1, 3, 2, 4), block_padding=8)
    memory = torch.zeros(64 + spec.nbytes + 16, dtype=torch.uint8)
    tensor = spec.view(memory[64:])
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (spec.shape, spec.allocate("cpu").stride(), dtype)
    assert tensor.data_ptr() == memory[64:].data_ptr()
    tensor.view(torch.uint8).fill_(1)
    assert not memory[:64].any()
    assert not memory[64 + spec.nbytes :].any()
    for wrong in (memory[: spec.nbytes - 1], memory.float(), memory.view(2, -1), memory[::2]):
        with refused(CacheError, problem="memory of shape", expected=f"({spec.nbytes} or more,) uint8"):
            spec.view(wrong)
