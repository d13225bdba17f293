"""Partial outputs merged by LSE, in new tensors and in place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import NotNegotiatedError, TensorError
from attnplug.ops import merge_attention_states, merge_into
from attnplug_kit.oracle import attend
from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel, run_interpreted

INF = math.inf


@given(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.integers(0, 1000))
def test_two_parts_of_the_keys_merge_into_all_keys(first: int, second: int, sink: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(5, 4, 8, generator=generator) * 3
    key = torch.randn(first + second, 2, 8, generator=generator)
    value = torch.randn(first + second, 2, 6, generator=generator)
    sinks = torch.randn(4, generator=generator) if sink else None
    kwargs = {"scale": 0.5, "causal": False}
    whole = attend(query, key, value, sinks=sinks, **kwargs)
    a = attend(query, key[:first], value[:first], sinks=sinks, **kwargs)
    b = attend(query, key[first:], value[first:], **kwargs)

    out, lse = merge_attention_states(a.output, a.lse_with_sink, b.output, b.lse, sink_in_a=sink)

    torch.testing.assert_close(out, whole.output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole.lse_with_sink, rtol=1e-12, atol=1e-12)


@given(
    st.lists(st.sampled_from([-INF, -1e30, -3.0, 0.0, 88.0, 1e30]), min_size=2, max_size=2),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_extreme_sums_stay_finite_and_ordered(lses: list[float], dtype: torch.dtype) -> None:
    out_a, out_b = torch.full((1, 1, 2), 2.0, dtype=dtype), torch.full((1, 1, 2), -2.0, dtype=dtype)
    lse_a, lse_b = (torch.full((1, 1), value) for value in lses)

    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)

    assert out.dtype == dtype
    assert not out.isnan().any()
    assert bool((lse >= torch.maximum(lse_a, lse_b)).all())
    assert bool((out >= 0).all()) if lses[0] >= lses[1] else bool((out <= 0).all())


def test_an_empty_side_may_hold_anything() -> None:
    garbage, value = torch.full((1, 1, 2), torch.nan), torch.tensor([[[1.0, 2.0]]])
    empty, some = torch.full((1, 1), -INF), torch.full((1, 1), 0.5)

    for out, lse in (
        merge_attention_states(garbage, empty, value, some),
        merge_attention_states(value, some, garbage, empty),
    ):
        assert out.tolist() == value.tolist()
        assert lse.tolist() == some.tolist()


def test_two_empty_sides_are_empty() -> None:
    garbage, empty = torch.full((1, 1, 2), torch.nan), torch.full((1, 1), -INF)

    out, lse = merge_attention_states(garbage, empty, garbage, empty)

    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.tolist() == [[-INF]]


def test_the_sink_counts_once() -> None:
    out, lse = torch.zeros(1, 1, 2), torch.zeros(1, 1)

    with pytest.raises(NotNegotiatedError, match="both sides of a merge include the sink"):
        merge_attention_states(out, lse, out, lse, sink_in_a=True, sink_in_b=True)


def test_wrong_shapes_are_named() -> None:
    out = torch.zeros(3, 2, 4)

    with pytest.raises(TensorError, match=r"\(2, 3\)"):
        merge_attention_states(out, torch.zeros(2, 3), out, torch.zeros(2, 3))


def test_the_first_result_is_overwritten() -> None:
    wide = torch.randn(3, 40)
    out, lse = wide[:, :32].unflatten(1, (4, 8)), torch.randn(3, 4)
    other, other_lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    wanted, total = merge_attention_states(out, lse, other, other_lse)
    rest = wide[:, 32:].clone()

    merge_into(out, lse, other, other_lse)

    assert torch.equal(out, wanted)
    assert torch.equal(lse, total)
    assert torch.equal(wide[:, 32:], rest)


def test_results_of_other_shapes_are_refused() -> None:
    out, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
    with pytest.raises(TensorError, match="were given"):
        merge_into(out, lse, out, lse.T)


@pytest.mark.slow
def test_the_kernel_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("test_merge_into_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles(dtype: str, capability: int) -> None:
    from attnplug.ops.triton_merge import _kernel  # noqa: PLC0415 - needs Triton

    kinds = {"out": f"*{dtype}", "lse": "*fp32", "other": f"*{dtype}", "other_lse": "*fp32"}
    constants = {"heads": 32, "size": 128, "unit": 8, "tile": 8, "width": 128}
    numbers = ("of_token", "of_sum", "of_sum_head", "rows")

    code = compile_kernel(_kernel, kinds, constants, unaligned=numbers, capability=capability, num_warps=4).asm["ptx"]

    assert "ld.global.v4" in code  # 16 bytes at a time
    assert "st.global.v4" in code
