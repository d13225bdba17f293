"""The oracle's rounding to int8 caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract.inputs.kv_cache import CacheSpec, CacheTensor, KVCache, torch_dtype
from attnplug.request.domains import PER_TOKEN_HEAD
from attnplug_kit.oracle import Case, by_channel, materialize, paged_tensors, tolerance
from attnplug_kit.oracle.rounding import Int8Rounding, by_row, int8_rounding


def cache_of(level: int) -> KVCache:
    shape, order = (5, 16, 2, 8), (0, 2, 1, 3)
    dtypes = {"k": torch.int8, "v": torch.int8 if level == 1 else torch.bfloat16}
    specs = {role: CacheTensor(shape, dtype, 0, order) for role, dtype in dtypes.items()}
    scales = {"k_scale": torch.zeros(5, 2, 16)} | ({"v_scale": torch.zeros(2, 8)} if level == 1 else {})
    pages = {role: spec.allocate("cpu") for role, spec in specs.items()}
    return KVCache({**pages, **scales}, 5, CacheSpec("split", "HND", specs))


def cache_per_token_head(dtype: str) -> KVCache:
    pages = CacheTensor((5, 16, 2, 8), torch_dtype(dtype), 0, (0, 2, 1, 3))
    scales = CacheTensor((5, 2, 16), torch.float32, 0)
    specs = {"k": pages, "v": pages, "k_scale": scales, "v_scale": scales}
    tensors = {role: spec.allocate("cpu") for role, spec in specs.items()}
    return KVCache(tensors, 5, CacheSpec("split", "HND", specs))


@given(st.lists(st.integers(-(2**20), 2**20).map(lambda number: number / 128), min_size=4, max_size=4))
def test_a_row_is_rounded_by_at_most_half_a_step(numbers: list[float]) -> None:
    rows = torch.tensor([[numbers]])
    quantized, scales = by_row(rows)

    assert quantized.abs().max() <= 127
    assert bool(scales > 0)
    apart = (quantized * scales[..., None].double() - rows.double()).abs()
    assert (apart <= scales.double() * (0.5 + 1e-4)).all()


def test_values_are_clipped_at_their_scale() -> None:
    scales = torch.tensor([[1.0, 0.5]])

    assert by_channel(torch.tensor([[[200.0, -1.25]], [[-3.4, 90.0]]]), scales).flatten().tolist() == [127, -2, -3, 127]


def test_only_int8_caches_round_to_int8() -> None:
    values = (torch.randn(3, 2, 8),)

    assert int8_rounding("auto", values) is None
    assert int8_rounding("fp8_e4m3", values) is None
    assert int8_rounding("int8_k", values).value_scales is None
    assert int8_rounding("int8", values).value_scales.shape == (2, 8)


@pytest.mark.parametrize(("level", "dtype"), [(1, "int8"), (2, "int8_k")])
def test_a_scene_fills_each_role(level: int, dtype: str) -> None:
    case = Case(query_lens=(1, 4), context_lens=(19, 0), head_size=8, dtype="bfloat16", kv_cache_dtype=dtype)
    scene, cache = materialize(case), cache_of(level)

    scene.fill(cache)

    tensors, (keys, scales) = paged_tensors(cache), by_row(scene.keys[0])
    block = int(scene.block_table[0, 1])
    assert torch.equal(tensors["key"][block, 2].double(), keys[18])
    assert torch.equal(tensors["key scale"][block, 2], scales[18])
    assert torch.equal(tensors["value"][block, 2].double(), scene.int8_rounding.values(scene.values[0])[18].double()
                       / (cache["v_scale"].double() if level == 1 else 1))  # fmt: skip
    assert tensors["key scale"][block, 3].isnan().all()  # this step's key is not there yet
    assert ("v_scale" in cache) == scene.has_byte_weights


@pytest.mark.parametrize("dtype", PER_TOKEN_HEAD)
def test_a_scene_fills_codes_and_scales_of_each_token(dtype: str) -> None:
    case = Case(query_lens=(1, 4), context_lens=(19, 0), head_size=8, dtype="bfloat16", kv_cache_dtype=dtype)
    scene, cache = materialize(case), cache_per_token_head(dtype)

    scene.fill(cache)

    tensors, block, most = paged_tensors(cache), int(scene.block_table[0, 1]), 448 if "fp8" in dtype else 127
    for name, rows, seen in zip(("key", "value"), (scene.keys, scene.values), scene.seen, strict=True):
        codes, scales = (tensors[each][block, 2].double() for each in (name, f"{name} scale"))
        assert torch.equal(codes.abs().amax(-1), torch.full((2,), float(most), dtype=torch.float64))
        assert torch.equal(codes * scales[:, None], seen[0][18])
        assert (seen[0] - rows[0].double())[18].abs().max() < float(scales.max()) * (0.5 if most == 127 else 16) * 1.001
        assert tensors[f"{name} scale"][block, 3].isnan().all()
    assert torch.equal(scene.int8_rounding.queries(scene.queries[0]), scene.queries[0])
    assert not scene.has_byte_weights


@pytest.mark.parametrize("dtype", PER_TOKEN_HEAD)
def test_rows_of_zeros_have_a_scale(dtype: str) -> None:
    codes, scales = by_row(torch.zeros(1, 2, 8), torch_dtype(dtype))

    assert not codes.any()
    assert (scales > 0).all()


def test_a_scene_expects_attention_of_rounded_rows() -> None:
    case = Case(query_lens=(1,), context_lens=(0,), head_size=8, num_q_heads=2, kv_cache_dtype="int8")
    scene = materialize(case)

    found = scene.expected().output[0]

    assert torch.equal(found[0], scene.int8_rounding.values(scene.values[0])[0, 0])
    assert not torch.equal(found[0], scene.values[0][0, 0].double())
    assert isinstance(scene.int8_rounding, Int8Rounding)


def test_int8_weights_have_a_larger_tolerance() -> None:
    plain, loose = tolerance(torch.float16), tolerance(torch.float16, byte_weights=True)

    assert (loose.atol, loose.rtol) == (plain.atol + 2**-6, plain.rtol + 2**-6)
    assert loose.lse == plain.lse
