"""Gradients through attnplug: torch's own backward, from a backend's output and log-sum-exp."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hosts.torch.tests.reference import counted, gradients, native, natively, natively_in_double, served, tensors

CALLS = {
    "plain": ((2, 4, 33, 64), (2, 4, 20, 64), {}),
    "causal": ((2, 4, 33, 64), (2, 4, 33, 64), {"is_causal": True}),
    "causal, more keys": ((2, 4, 5, 64), (2, 4, 9, 64), {"is_causal": True}),
    "scale": ((1, 2, 9, 64), (1, 2, 9, 64), {"scale": 0.5}),
    "mask": (
        (2, 4, 6, 32),
        (2, 4, 6, 32),
        {"attn_mask": torch.eye(6, dtype=torch.bool).roll(1, 0) | torch.eye(6).bool()},
    ),
    "hidden rows": ((2, 4, 6, 32), (2, 4, 6, 32), {"attn_mask": torch.ones(6, 6).tril(-1).bool()}),
    "grouped heads": ((2, 8, 9, 32), (2, 2, 9, 32), {"enable_gqa": True}),
}


@pytest.mark.parametrize(("queries", "keys", "arguments"), CALLS.values(), ids=CALLS)
def test_gradients_are_those_of_torch(queries, keys, arguments, active) -> None:
    inputs = tensors(queries, keys)

    found = gradients(sdpa, inputs, **arguments)

    assert counted() == {("torch/sdpa", ""): 1}
    expected = gradients(natively_in_double, inputs, **arguments)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_half_precision(dtype, active) -> None:
    inputs = tensors((2, 4, 17, 64), (2, 4, 17, 64), dtype)

    found = gradients(sdpa, inputs, is_causal=True)

    assert served() == 1
    expected = gradients(natively_in_double, inputs, is_causal=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_gradcheck_in_double_through_torch(active) -> None:
    inputs = tensors((1, 2, 4, 8), (1, 2, 4, 8), torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda *given: sdpa(*given, is_causal=True), inputs)

    (reason,) = [reason for backend, reason in counted() if backend is None]
    assert "float64" in reason
    assert served() == 0


def test_second_gradients_run_in_the_math_operator(active) -> None:
    inputs = tensors((1, 1, 3, 4), (1, 1, 3, 4), torch.float64, requires_grad=True)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(sdpa, inputs)

    (reason,) = [reason for backend, reason in counted() if backend is None]
    assert "sdpa_kernel" in reason


def test_a_mask_that_requires_a_gradient_is_left_to_torch(active) -> None:
    inputs, mask = tensors((1, 2, 6, 8), (1, 2, 6, 8)), torch.randn(6, 6, requires_grad=True)

    sdpa(*inputs, attn_mask=mask).square().sum().backward()

    ((backend, reason),) = counted()
    assert backend is None
    assert "requires a gradient" in reason
    found, mask.grad = mask.grad, None
    native(*inputs, attn_mask=mask).square().sum().backward()
    torch.testing.assert_close(found, mask.grad)


def test_dropout_trains_in_torch(active) -> None:
    inputs = tensors((1, 2, 64, 8), (1, 2, 64, 8))

    torch.manual_seed(3)
    found = gradients(sdpa, inputs, dropout_p=0.4)
    torch.manual_seed(3)
    expected = gradients(native, inputs, dropout_p=0.4)

    assert served() == 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_of_training_is_that_of_torch(active) -> None:
    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 32, batch_first=True, dropout=0.0)
    rows = torch.randn(2, 7, 32)

    def step():
        layer.zero_grad()
        layer(rows).square().sum().backward()
        return [one.grad.clone() for one in layer.parameters()]

    found = step()
    assert served() == 1
    with natively():
        expected = step()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap, with and without attnplug
def test_functions_of_torch_func_have_the_result_of_torch(active) -> None:
    query = torch.randn(3, 2, 4, 8, 16)

    def loss(one):
        return sdpa(one, one, one, is_causal=True).square().sum()

    found, mapped = torch.func.grad(loss)(query[0]), torch.func.vmap(lambda one: sdpa(one, one, one))(query)
    with natively():
        torch.testing.assert_close(found, torch.func.grad(loss)(query[0]), rtol=1e-4, atol=1e-4)
        expected = torch.func.vmap(lambda one: sdpa(one, one, one))(query)
    torch.testing.assert_close(mapped, expected, rtol=1e-5, atol=1e-5)
