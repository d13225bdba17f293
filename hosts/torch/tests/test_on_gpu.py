"""The operators of CUDA, on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug
import attnplug_torch
from hosts.torch.tests.reference import (
    TOLERANCES,
    by_sequence,
    counted,
    gradients,
    native,
    natively,
    natively_in_double,
    served,
    tensors,
    varlen_attn,
)

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]
SHAPES = {"plain": ((2, 8, 300, 64), {}), "causal": ((2, 8, 300, 128), {"is_causal": True})}


@pytest.fixture(autouse=True)
def flash_alone():
    """Let torch take flash attention wherever it can: by default it may prefer cuDNN."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield


@pytest.fixture
def varlen():
    return pytest.importorskip("torch.nn.attention.varlen")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("shape", "arguments"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("heads_first", [True, False])
def test_calls_run_on_a_backend(shape, arguments, dtype, heads_first, active) -> None:
    inputs = tensors(shape, shape, dtype, "cuda")
    if not heads_first:
        inputs = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in inputs]

    found = sdpa(*inputs, **arguments)

    assert served() == 1, counted()
    assert found.stride() == native(*inputs, **arguments).stride()
    tolerance = TOLERANCES[dtype]
    expected = natively_in_double(*inputs, **arguments)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("shape", "arguments"), SHAPES.values(), ids=SHAPES)
def test_gradients_are_those_of_torch(shape, arguments, dtype, active) -> None:
    inputs = tensors(shape, shape, dtype, "cuda")

    found = gradients(sdpa, inputs, **arguments)

    assert served() == 1
    with natively():
        expected = gradients(sdpa, inputs, **arguments)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_grouped_heads_and_odd_sizes(active) -> None:
    inputs = tensors((2, 8, 33, 80), (2, 2, 33, 80), torch.bfloat16, "cuda")
    found = sdpa(*inputs, enable_gqa=True)
    odd = tensors((2, 4, 33, 60), (2, 4, 33, 60), torch.bfloat16, "cuda")  # padded by torch

    torch.testing.assert_close(found, native(*inputs, enable_gqa=True), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sdpa(*odd), native(*odd), rtol=2e-2, atol=2e-2)
    assert served() == 2


def test_a_full_graph_runs_on_a_backend(active) -> None:
    def causal(*given):
        return sdpa(*given, is_causal=True) * 2

    compiled = torch.compile(causal, fullgraph=True)
    for heads_first in (True, False):
        inputs = tensors((2, 8, 64, 64), (2, 8, 64, 64), torch.bfloat16, "cuda")
        if not heads_first:
            inputs = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in inputs]
        attnplug_torch.reset()
        found = gradients(compiled, inputs)
        assert served() == 1
        with natively():
            expected = gradients(causal, inputs)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_a_captured_graph_has_torchs_own_operator(active) -> None:
    inputs = tensors((1, 4, 64, 64), (1, 4, 64, 64), torch.bfloat16, "cuda")
    sdpa(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sdpa(*inputs)
    graph.replay()

    torch.testing.assert_close(found, native(*inputs), rtol=2e-2, atol=2e-2)
    (reason,) = [reason for backend, reason in counted() if backend is None]
    assert "CUDA graph" in reason


@pytest.mark.parametrize(
    ("choice", "name"), [(SDPBackend.EFFICIENT_ATTENTION, "memory-efficient"), (SDPBackend.CUDNN_ATTENTION, "cuDNN")]
)
def test_other_operators_are_counted(choice, name, active) -> None:
    inputs = tensors((1, 4, 64, 64), (1, 4, 64, 64), torch.bfloat16, "cuda")

    with sdpa_kernel(choice):
        found = sdpa(*inputs)
        forecast = attnplug_torch.explain(*inputs)

    ((backend, reason),) = counted()
    assert (backend, reason) == (forecast.backend, forecast.reason)
    assert name in reason
    torch.testing.assert_close(found, native(*inputs), rtol=2e-2, atol=2e-2)


def test_masks_run_in_torchs_other_operators(active) -> None:
    inputs = tensors((1, 4, 64, 64), (1, 4, 64, 64), torch.bfloat16, "cuda")

    sdpa(*inputs, attn_mask=torch.ones(64, 64, dtype=torch.bool, device="cuda"))

    ((backend, reason),) = counted()
    assert backend is None
    assert "attn_mask" in reason


STARTS = torch.tensor([0, 50, 51, 200], dtype=torch.int32)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("window", "features"),
    [
        ((-1, -1), {"causal": False}),
        ((-1, 0), {"causal": True}),
        ((9, 0), {"causal": True, "window": (9, 0)}),
        ((4, 2), {"causal": False, "window": (4, 2)}),  # torch's own
    ],
)
def test_packed_sequences(window, features, dtype, varlen, active) -> None:
    inputs = [torch.randn(200, heads, 64, device="cuda").to(dtype) for heads in (8, 2, 2)]
    starts = STARTS.cuda()
    given = (starts, starts, 149, 149)

    def call(*rows):
        return varlen_attn(*rows, *given, window_size=window, enable_gqa=True)

    output, lse = varlen_attn(
        *inputs, *given, window_size=window, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True)
    )
    expected, expected_lse = by_sequence(*inputs, STARTS, STARTS, **features)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(output.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.T.double().cpu(), expected_lse, rtol=1e-3, atol=1e-3)
    found = gradients(call, inputs)
    assert served() == (0 if window == (4, 2) else 2), counted()
    with natively():
        wanted = gradients(call, inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_pages(active) -> None:
    block_size, used = 256, torch.tensor([300, 70, 512], dtype=torch.int32)
    starts, blocks = torch.tensor([0, 5, 6, 40], dtype=torch.int32), torch.randperm(6).view(3, 2).to(torch.int32)
    query = torch.randn(40, 8, 64, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(6, block_size, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    output = varlen_attn(
        query, keys, values, starts.cuda(), None, 34, 512, window_size=(-1, 0), enable_gqa=True,
        seqused_k=used.cuda(), block_table=blocks.cuda(),
    )  # fmt: skip

    assert served() == 1, counted()
    key, value = (
        torch.cat([pool[row].flatten(0, 1)[:length] for row, length in zip(blocks, used.tolist(), strict=True)])
        for pool in (keys, values)
    )
    key_starts = torch.nn.functional.pad(used.cumsum(0), (1, 0))
    expected, _ = by_sequence(query, key, value, starts, key_starts, causal=True)
    torch.testing.assert_close(output.double().cpu(), expected, rtol=2e-2, atol=2e-2)


def test_a_variant_that_calls_the_replaced_operator_does_not_recurse(active) -> None:
    if not any(one.id == "flash_attn/torch" for one in attnplug.registry().candidates()):
        pytest.skip("requires attnplug-flash-attn")
    inputs = tensors((1, 4, 64, 64), (1, 4, 64, 64), torch.bfloat16, "cuda")

    with attnplug.using(backend="flash_attn/torch"):
        found = sdpa(*inputs)

    assert counted() == {("flash_attn/torch", ""): 1}
    torch.testing.assert_close(found, native(*inputs), rtol=0, atol=0)


def test_restoring_restores(active) -> None:
    inputs = tensors((1, 4, 64, 64), (1, 4, 64, 64), torch.bfloat16, "cuda")
    before = native(*inputs)
    sdpa(*inputs)
    active.restore_flash_attention_impl()

    torch.testing.assert_close(sdpa(*inputs), before, rtol=0, atol=0)
    assert served() == 1
