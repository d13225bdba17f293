"""`scaled_dot_product_attention` through attnplug beside torch's own operators."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug
import attnplug_torch
from attnplug.errors import NoBackendError
from attnplug_kit.oracle import attend
from attnplug_torch import decisions, dense, repeated
from core.tests.dense.counting import assert_costs_at_most
from hosts.torch.tests.reference import TOLERANCES, counted, native, natively, natively_in_double, served, tensors

CALLS = {
    "plain": ((2, 4, 33, 64), (2, 4, 20, 64), {}),
    "causal": ((2, 4, 33, 64), (2, 4, 33, 64), {"is_causal": True}),
    "causal, more keys": ((2, 4, 5, 64), (2, 4, 9, 64), {"is_causal": True}),
    "scale": ((2, 4, 33, 64), (2, 4, 33, 64), {"scale": 0.3}),
    "grouped heads": ((2, 8, 17, 64), (2, 2, 17, 64), {"enable_gqa": True, "is_causal": True}),
    "one query": ((3, 4, 1, 64), (3, 4, 50, 64), {}),
    "one token": ((1, 1, 1, 8), (1, 1, 1, 8), {"is_causal": True}),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("queries", "keys", "arguments"), CALLS.values(), ids=CALLS)
def test_calls_run_on_a_backend(queries, keys, arguments, dtype, active) -> None:
    inputs = tensors(queries, keys, dtype)

    found = sdpa(*inputs, **arguments)

    assert counted() == {("torch/sdpa", ""): 1}
    tolerance = TOLERANCES[dtype]
    expected = natively_in_double(*inputs, **arguments)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 8, 24, 80, 96, 128, 256, 320])
def test_heads_may_have_any_size(size, active) -> None:
    inputs = tensors((1, 2, 7, size), (1, 2, 7, size))

    found = sdpa(*inputs, is_causal=True)

    assert served() == 1
    torch.testing.assert_close(found.double(), natively_in_double(*inputs, is_causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "grad", "python_calls"),
    [({}, False, 40), ({"is_causal": True}, True, 40), ({"attn_mask": torch.zeros(9, 9)}, False, 85)],
    ids=["plain", "causal, gradients", "mask"],
)
def test_a_repeated_call_costs_the_host_little(arguments, grad, python_calls, active) -> None:
    inputs = [one.requires_grad_(grad) for one in tensors((1, 2, 9, 64), (1, 2, 9, 64))]

    assert_costs_at_most(lambda: sdpa(*inputs, **arguments), python_calls, operations=2)


MASKS = {
    "boolean": lambda: torch.rand(2, 1, 33, 20) > 0.3,
    "boolean of each head": lambda: torch.rand(2, 4, 33, 20) > 0.3,
    "additive": lambda: torch.randn(2, 4, 33, 20),
    "additive for all": lambda: torch.randn(33, 20),
    "additive of each head": lambda: torch.randn(1, 4, 33, 20),
    "additive by key": lambda: torch.randn(2, 1, 1, 20),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_are_served(mask, active) -> None:
    inputs, mask = tensors((2, 4, 33, 64), (2, 4, 20, 64)), mask()

    found = sdpa(*inputs, attn_mask=mask)

    assert counted() == {("torch/sdpa", ""): 1}
    torch.testing.assert_close(found.double(), natively_in_double(*inputs, attn_mask=mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_query_of_no_key_has_the_output_of_torch(dtype, active) -> None:
    inputs, visible = tensors((2, 4, 6, 64), (2, 4, 5, 64)), torch.rand(2, 1, 6, 5) > 0.3
    visible[0, 0, 2] = visible[1, 0, 5] = False
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)

    found = sdpa(*inputs, attn_mask=mask)

    assert served() == 1
    assert not found[0, :, 2].any()
    torch.testing.assert_close(found, native(*inputs, attn_mask=mask), rtol=1e-5, atol=1e-5)


def test_a_mask_that_changes_in_place_is_read_anew(active) -> None:
    inputs, mask = tensors((1, 2, 6, 64), (1, 2, 5, 64)), torch.randn(6, 5)
    sdpa(*inputs, attn_mask=mask)

    mask.add_(torch.randn(6, 5))

    torch.testing.assert_close(sdpa(*inputs, attn_mask=mask), native(*inputs, attn_mask=mask), rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "tokens before heads": lambda: torch.randn(2, 9, 4, 64).transpose(1, 2),
    "one tensor for all": lambda: torch.randn(2, 9, 3, 4, 64).transpose(1, 3)[:, :, 1],
    "every second token": lambda: torch.randn(2, 4, 18, 64)[:, :, ::2],
    "a batch of one, repeated": lambda: torch.randn(1, 4, 9, 64).expand(2, -1, -1, -1),
    "heads repeated": lambda: torch.randn(2, 1, 9, 64).expand(-1, 4, -1, -1),
    "a part of wider heads": lambda: torch.randn(2, 4, 9, 100)[..., 20:84],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_are_any_and_the_output_has_those_of_torch(make, active) -> None:
    inputs = [make() for _ in range(3)]

    found = sdpa(*inputs, is_causal=True)
    expected = native(*inputs, is_causal=True)

    assert served() == 1
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from((1, 8, 20, 64)), st.booleans(), st.sampled_from((None, "boolean", "additive")),
    st.sampled_from((None, 0.1, 1.0)), st.integers(0, 99),
)  # fmt: skip
def test_every_shape_has_the_result_of_torch(  # noqa: PLR0917 - one for each thing that is drawn
    batch, kv_heads, ratio, queries, keys, size, causal, mask, scale, seed
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = tensors((batch, kv_heads * ratio, queries, size), (batch, kv_heads, keys, size))
        bias = torch.randn(batch, 1, queries, keys)
    given_mask = None if mask is None else bias > 0 if mask == "boolean" else bias
    arguments = {"attn_mask": given_mask, "is_causal": causal and mask is None, "scale": scale, "enable_gqa": True}
    attnplug_torch.register()
    torch.nn.attention.activate_flash_attention_impl("attnplug")
    try:
        found = sdpa(*inputs, **arguments)
    finally:
        torch.nn.attention.restore_flash_attention_impl()

    torch.testing.assert_close(found.double(), natively_in_double(*inputs, **arguments), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (1, 9), (9, 9)])
def test_the_operator_of_cuda_has_the_last_query_at_the_last_key(queries, keys) -> None:
    """`torch.nn.attention.bias.causal_lower_right` calls it so; it runs here on tensors of the CPU."""
    inputs = tensors((2, 4, queries, 64), (2, 2, keys, 64))

    ran, (output, lse, *_) = dense.on_cuda(*inputs, is_causal=True)

    assert ran == "torch/sdpa"
    for one in range(2):
        rows = [each[one].transpose(0, 1).double() for each in inputs]
        expected = attend(*rows, scale=0.125, causal=True)
        torch.testing.assert_close(output[one].transpose(0, 1).double(), expected.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[one].T.double(), expected.lse, rtol=1e-5, atol=1e-5)
    assert lse.is_contiguous()


def test_the_operators_of_both_devices_keep_separate_calls(active) -> None:
    inputs = tensors((1, 2, 5, 64), (1, 2, 9, 64))

    for _ in range(2):
        last = dense.on_cuda(*inputs, is_causal=True)[1][0]
        first = dense.on_cpu(*inputs, is_causal=True)[1][0]
        torch.testing.assert_close(first, native(*inputs, is_causal=True), rtol=1e-5, atol=1e-5)
        mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
        torch.testing.assert_close(last, native(*inputs, attn_mask=mask), rtol=1e-5, atol=1e-5)


def test_more_causal_queries_than_keys_are_refused_on_cuda_too() -> None:
    with pytest.raises(decisions.RefusedError, match="more queries than keys"):
        dense.on_cuda(*tensors((1, 2, 9, 64), (1, 2, 5, 64)), is_causal=True)
    with pytest.raises(decisions.RefusedError, match="return_debug_mask"):
        dense.on_cuda(*tensors((1, 2, 9, 64), (1, 2, 9, 64)), return_debug_mask=True)


def test_a_repeated_call_reads_its_own_tensors(active) -> None:
    """What is kept of a call serves other tensors of its shapes, and none of another scale, stride or device type."""
    for layout in LAYOUTS.values():
        for scale in (None, 0.5, None):
            inputs = [layout() for _ in range(3)]
            for causal in (True, False):
                found = sdpa(*inputs, scale=scale, is_causal=causal)
                expected = native(*inputs, scale=scale, is_causal=causal)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_repeated_call_has_the_strides_and_the_length_of_its_query(active) -> None:
    """The keys of these calls are of one shape and layout."""
    key = torch.randn(2, 4, 9, 64)
    queries = [layout() for layout in LAYOUTS.values()] + [torch.randn(2, 4, 7, 64), torch.randn(2, 4, 9, 64)]

    for query in queries:
        found, expected = sdpa(query, key, key), native(query, key, key)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found.stride() == expected.stride()


def test_what_is_kept_of_calls_is_bounded(active) -> None:
    for tokens in range(1, 2 * repeated._MOST):
        sdpa(*tensors((1, 1, tokens, 8), (1, 1, tokens, 8)))

    assert len(repeated._calls) == repeated._MOST
    attnplug.refresh()
    sdpa(*tensors((1, 1, 3, 8), (1, 1, 3, 8)))
    assert len(repeated._calls) == 1


OWN = {
    "more causal queries than keys": ((1, 2, 9, 64), (1, 2, 5, 64), {"is_causal": True}, "more queries than keys"),
    "dropout": ((1, 2, 9, 64), (1, 2, 9, 64), {"dropout_p": 1.0}, "dropout_p=1.0"),
}
if Version(torch.__version__) < Version("2.14"):  # which adds one
    OWN["no batch axis"] = ((2, 9, 64), (2, 9, 64), {}, "a query of 3 axes")


@pytest.mark.parametrize(("queries", "keys", "arguments", "reason"), OWN.values(), ids=OWN)
def test_what_no_backend_serves_runs_in_torch(queries, keys, arguments, reason, active) -> None:
    inputs = tensors(queries, keys)

    found = sdpa(*inputs, **arguments)

    ((backend, why),) = counted()
    assert backend is None
    assert reason in why
    torch.testing.assert_close(found, native(*inputs, **arguments), rtol=0, atol=0, equal_nan=True)
    assert reason in attnplug_torch.explain(*inputs, **arguments).reason


def test_double_is_left_to_torch(active) -> None:
    inputs = tensors((1, 2, 9, 64), (1, 2, 9, 64), torch.float64)

    assert torch.equal(sdpa(*inputs), native(*inputs))
    ((backend, reason),) = counted()
    assert backend is None
    assert "float64" in reason


def test_a_mask_of_more_digits_than_the_call_is_left_to_torch(active) -> None:
    inputs, mask = tensors((1, 2, 9, 64), (1, 2, 9, 64), torch.bfloat16), torch.randn(9, 9)

    assert torch.equal(sdpa(*inputs, attn_mask=mask), native(*inputs, attn_mask=mask))
    ((backend, reason),) = counted()
    assert (backend, reason) == (None, "an attn_mask of torch.float32 for a call in torch.bfloat16")


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 9, 9), (2, 0, 9), (2, 9, 0)])
def test_calls_without_elements_have_the_result_of_torch(batch, queries, keys, active) -> None:
    inputs = tensors((batch, 4, queries, 64), (batch, 4, keys, 64))

    torch.testing.assert_close(sdpa(*inputs), native(*inputs), equal_nan=True)
    assert sum(counted().values()) <= 1  # 2.11 calls an operator, 2.13 none


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_are_served(mode, active) -> None:
    with mode():
        inputs = tensors((2, 4, 9, 64), (2, 4, 9, 64))
        mask = torch.randn(9, 9)
        found = sdpa(*inputs, attn_mask=mask)

    assert served() == 1
    torch.testing.assert_close(found, native(*inputs, attn_mask=mask), rtol=1e-5, atol=1e-5)


def test_autocast_decides_the_dtype(active) -> None:
    inputs = tensors((2, 4, 9, 64), (2, 4, 9, 64))

    with torch.autocast("cpu", torch.bfloat16):
        found = sdpa(*inputs)

    assert found.dtype == torch.bfloat16
    assert served() == 1


def test_modules_of_torch_are_served(active) -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dropout=0.0)
    rows = torch.randn(2, 7, 64)

    found = layer(rows)

    assert served() == 1
    with natively():
        torch.testing.assert_close(found, layer(rows), rtol=1e-5, atol=1e-5)


def test_a_backend_that_is_named_serves_or_the_call_is_an_error(active) -> None:
    inputs = tensors((1, 2, 8, 64), (1, 2, 8, 64))

    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        sdpa(*inputs)
    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):  # a second time, too
        sdpa(*inputs)
    with attnplug.using(backend="torch"):
        sdpa(*inputs)

    assert counted() == {("torch/sdpa", ""): 1}


def test_a_kind_of_call_is_decided_once_in_a_scope(active, monkeypatch) -> None:
    decided, decide = [], decisions._decide
    monkeypatch.setattr(decisions, "_decide", lambda *given, **more: (decided.append(given), decide(*given, **more))[1])

    def calls():
        for tokens in (8, 9, 8):
            sdpa(*tensors((1, 2, tokens, 64), (1, 2, tokens, 64)))

    for count, scope in ((1, nullcontext()), (2, attnplug.using(backend="torch")), (2, nullcontext())):
        with scope:
            calls()
        assert len(decided) == count
    attnplug.refresh()
    calls()
    assert len(decided) == 3
