"""The fake computes attention: its results equal the oracle's, up to one rounding."""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from attnplug.contract.inputs.kv_cache import torch_dtype
from attnplug_kit.oracle import Case, Scene, assert_close, attend, materialize

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fakes")

MIXED = Case(query_lens=(1, 3, 17), context_lens=(20, 5, 0), head_size=64, dtype="bfloat16")
DECODES = Case(query_lens=(1, 1, 1), context_lens=(20, 0, 47), head_size=64, dtype="float16")
DENSE = evolve(MIXED, attn_type="encoder_only", causal=False, context_lens=(0, 0, 0))
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "soft_cap": {"logits_soft_cap": 2.0, "gain": 4.0},
    "not_causal": {"causal": False},
    "shared": {"num_kv_heads": 4},
    "pages_of_one": {"block_size": 1},
    "e4m3": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.3, "v_scale": 0.7},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.3, "v_scale": 0.7},
}
LN2 = math.log(2.0)


def library() -> Any:
    """Return the fake, which is importable only while a test runs."""
    return import_module("flashinfer")


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 16, dtype=torch.uint8)


def pages(scene: Scene) -> tuple[torch.Tensor, ...]:
    """Return the page arrays of a plan."""
    size = scene.case.block_size
    counts = [-(-length // size) for length in scene.case.seq_lens]
    indptr = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    indices = torch.cat([row[:count] for row, count in zip(scene.block_table, counts, strict=True)])
    last = [length - (count - 1) * size for length, count in zip(scene.case.seq_lens, counts, strict=True)]
    return indptr, indices, torch.tensor(last, dtype=torch.int32)


def offsets(*lens: int) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)


def cache_of(scene: Scene, layout: str, *, as_tuple: bool = False) -> Any:
    """Return a KV cache in the library's layout, with NaN in unused slots."""
    case = scene.case
    dtype = torch_dtype(case.requirements().kv_cache_dtype)
    cache = torch.empty(2, scene.num_blocks, case.block_size, case.num_kv_heads, case.head_size, dtype=dtype)
    scene.fill(SimpleNamespace(k=cache[0], v=cache[1]), written=True)
    halves = cache if layout == "NHD" else cache.transpose(2, 3).contiguous()
    return (halves[0], halves[1]) if as_tuple else halves.transpose(0, 1).contiguous()


def shape_of(scene: Scene) -> dict[str, Any]:
    case = scene.case
    dtype = torch_dtype(case.dtype)
    return {
        "window_left": case.window[0],
        "logits_soft_cap": case.logits_soft_cap,
        "sm_scale": scene.scale,
        "q_data_type": dtype,
        "kv_data_type": torch_dtype(case.requirements().kv_cache_dtype),
        "o_data_type": dtype,
    }


def scales(scene: Scene) -> dict[str, float]:
    return {} if scene.rounding is None else {"k_scale": scene.case.k_scale, "v_scale": scene.case.v_scale}


def compare(scene: Scene, output: torch.Tensor, lse: torch.Tensor) -> None:
    exact = scene.expected()
    dtype, scaled = torch_dtype(scene.case.dtype), scene.rounding is not None
    assert_close(output, exact.output, dtype=dtype, scale=scene.largest_value, scaled_keys=scaled)
    wanted = exact.lse if scene.sinks is None else exact.lse_with_sink
    assert_close(lse * LN2, wanted, dtype=torch.float32, what="lse")  # the library's LSE has base 2


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("feature", FEATURES)
def test_prefill(feature, layout, as_tuple):
    scene = materialize(evolve(MIXED, **FEATURES[feature]))
    case = scene.case
    wrapper = library().BatchPrefillWithPagedKVCacheWrapper(workspace(), layout, backend="fa2")
    wrapper.plan(
        offsets(*case.query_lens), *pages(scene), case.num_q_heads, case.num_kv_heads, 64, case.block_size,
        causal=case.causal, **shape_of(scene),
    )  # fmt: skip
    query, cache = torch.cat(scene.queries), cache_of(scene, layout, as_tuple=as_tuple)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    result = wrapper.run(query, cache, out=out, lse=lse, return_lse=True, **scales(scene))
    assert result[0] is out
    assert result[1] is lse
    compare(scene, out, lse)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("use_tensor_cores", [False, True])
@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "not_causal"])
def test_decode(feature, use_tensor_cores, layout):
    scene = materialize(evolve(DECODES, **FEATURES[feature]))
    case = scene.case
    wrapper = library().BatchDecodeWithPagedKVCacheWrapper(
        workspace(), layout, use_tensor_cores=use_tensor_cores, backend="fa2"
    )
    wrapper.plan(*pages(scene), case.num_q_heads, case.num_kv_heads, 64, case.block_size, **shape_of(scene))
    compare(scene, *wrapper.run(torch.cat(scene.queries), cache_of(scene, layout), return_lse=True, **scales(scene)))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_sinks(backend, window):
    scene = materialize(evolve(MIXED, sinks=True, sliding_window=window))
    case, dtypes = scene.case, {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    left = case.window[0]
    wrapper = library().BatchAttentionWithAttentionSinkWrapper(
        workspace(), "NHD", backend=backend, head_dim_qk=64, head_dim_vo=64, window_left=left, **dtypes
    )
    wrapper.plan(
        offsets(*case.query_lens), *pages(scene), case.num_q_heads, case.num_kv_heads, 64, case.block_size,
        causal=True, window_left=left, **dtypes,
    )  # fmt: skip
    query = torch.cat(scene.queries)
    compare(scene, *wrapper.run(query, cache_of(scene, "NHD"), scene.sinks, scene.scale, return_lse=True))


@pytest.mark.parametrize("case", [MIXED, DENSE, evolve(MIXED, logits_soft_cap=3.0, sliding_window=4)])
def test_ragged(case):
    scene = materialize(case)
    wrapper = library().BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa3")
    wrapper.plan(
        offsets(*case.query_lens), offsets(*case.key_lens), case.num_q_heads, case.num_kv_heads, 64,
        causal=case.causal, **shape_of(scene),
    )  # fmt: skip
    rows = (torch.cat(part) for part in (scene.queries, scene.keys, scene.values))
    compare(scene, *wrapper.run(*rows, return_lse=True))


def test_rows_without_keys_are_zero():
    wrapper = library().BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa2")
    wrapper.plan(offsets(3, 2), offsets(1, 0), 2, 1, 64, causal=True, sm_scale=1.0)
    rows = torch.randn(5, 2, 64).half()
    output, lse = wrapper.run(rows, rows[:1, :1], rows[1:2, 1:], return_lse=True)
    assert torch.equal(output[[0, 1, 3, 4]], torch.zeros(4, 2, 64).half())
    assert torch.equal(output[2], rows[1:2, 1].expand(2, 64))
    assert (lse[[0, 1, 3, 4]] < -4e4).all()  # -inf or -50,000, by kernel


def test_merged_states_are_those_of_all_keys(partial_of):
    scene = materialize(evolve(MIXED, query_lens=(4,), context_lens=(30,), causal=False))
    (first, second), exact = partial_of(scene, 11), scene.expected()
    library().merge_state_in_place(*first, *second)
    assert_close(first[0].bfloat16(), exact.output, dtype=torch.bfloat16, scale=scene.largest_value)
    assert_close(first[1] * LN2, exact.lse, dtype=torch.float32, what="lse")


@pytest.fixture
def partial_of() -> Callable[[Scene, int], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a function that splits the keys at an index: outputs and base-2 LSE over both parts."""

    def split(scene: Scene, place: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        (query,), (key,), (value,) = scene.queries, scene.keys, scene.values
        parts = [slice(None, place), slice(place, None)]
        done = [attend(query, key[part], value[part], scale=scene.scale, causal=False) for part in parts]
        return [(each.output.float(), (each.lse / LN2).float()) for each in done]

    return split
