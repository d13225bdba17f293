"""Calls of `dispatch_attention_fn` on a backend, beside diffusers' native attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug.errors import NoBackendError, NotNegotiatedError, SettingsError, TensorError
from attnplug_kit.oracle import attend
from core.tests.dense.counting import assert_costs_at_most
from hosts.diffusers.tests.models import MASK

CALLS = {
    "causal": ((2, 40, 4, 64), (2, 40, 4, 64), {"is_causal": True}),
    "causal with more keys": ((2, 20, 4, 64), (2, 40, 4, 64), {"is_causal": True}),
    "causal with more queries": ((2, 40, 4, 64), (2, 20, 4, 64), {"is_causal": True}),
    "grouped heads": ((2, 40, 4, 64), (2, 40, 2, 64), {"enable_gqa": True}),
    "cross": ((2, 40, 4, 64), (2, 9, 4, 64), {}),
    "mask": ((2, 40, 4, 64), (2, 40, 4, 64), {"attn_mask": torch.rand(2, 1, 40, 40) > 0.3}),
    "mask of each head": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": torch.rand(2, 4, 40, 12) > 0.3}),
    "mask for all": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": torch.rand(40, 12) > 0.3}),
    "padding": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": MASK.bool()[:, None, None, :]}),
    "padding of two axes": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": MASK.bool()}),
    "padding of two axes, added": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": (MASK - 1) * 1e4}),
    "additive mask": ((2, 40, 4, 64), (2, 40, 4, 64), {"attn_mask": torch.randn(2, 1, 40, 40)}),
    "additive mask of each head": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": torch.randn(1, 4, 40, 12)}),
    "scale": ((2, 40, 4, 64), (2, 40, 4, 64), {"scale": 0.3}),
    "scale and padding": ((2, 40, 4, 64), (2, 12, 4, 64), {"scale": 0.3, "attn_mask": MASK.bool()}),
    "no window": ((2, 40, 4, 64), (2, 40, 4, 64), {"attention_kwargs": {"window_size": (-1, -1), "softcap": 0.0}}),
}


@pytest.fixture
def dispatched(dispatch):
    """Return `dispatch_attention_fn` with the backend of these settings."""
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    def call(*tensors, backend=None, options=None, native_fallback=False, **arguments):
        member = attention_for(backend, options, native_fallback=native_fallback).member
        return dispatch.dispatch_attention_fn(*tensors, backend=member, **arguments)

    return call


def tensors(queries=(2, 40, 4, 64), keys=None, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for shape in (queries, keys or queries, keys or queries)]


@pytest.mark.parametrize(("queries", "keys", "arguments"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_call_is_that_of_the_native_backend(
    queries, keys, arguments, dtype, fallback, dispatch, dispatched, runs
) -> None:
    inputs, mask = tensors(queries, keys, dtype), arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        arguments = {**arguments, "attn_mask": mask.to(dtype)}

    wanted = dispatch.dispatch_attention_fn(*inputs, **arguments)
    assert not runs
    found = dispatched(*inputs, native_fallback=fallback, **arguments)

    assert runs
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 12), st.integers(1, 12),
    st.sampled_from((None, "by key", "boolean", "added")), st.sampled_from((None, 0.7)), st.integers(0, 99),
)  # fmt: skip
def test_outputs_and_lse_are_those_of_the_oracle(batch, kv_heads, group, queries, keys, mask, scale, seed) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed; it requires Python 3.11")
    from diffusers.models.attention_dispatch import dispatch_attention_fn  # noqa: PLC0415 - see above

    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - likewise

    torch.manual_seed(seed)
    inputs = tensors((batch, queries, kv_heads * group, 8), (batch, keys, kv_heads, 8))
    shape = (batch, keys) if mask == "by key" else (batch, 1, queries, keys)
    visible = torch.rand(shape) > 0.3  # some queries, and some whole sequences, may attend to nothing
    given = None if mask is None else torch.randn(shape) if mask == "added" else visible

    output, lse = dispatch_attention_fn(
        *inputs, attn_mask=given, scale=scale, enable_gqa=True, attention_kwargs={"return_lse": True},
        backend=attention_for(None, None, native_fallback=False).member,
    )  # fmt: skip

    wide = None
    if given is not None:
        wide = (given[:, None, None] if mask == "by key" else given).expand(batch, 1, queries, keys)
    for one in range(batch):
        wanted = attend(
            *(each[one].double() for each in inputs),
            scale=8**-0.5 if scale is None else scale,
            causal=False,
            custom_mask=None if wide is None or mask == "added" else wide[one, 0],
            attn_bias=wide[one] if mask == "added" else None,
        )
        torch.testing.assert_close(output[one].double(), wanted.output.view_as(output[one]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[one].T.double(), wanted.lse, rtol=1e-5, atol=1e-5)


REFUSED = {
    "dropout": ({"dropout_p": 0.1}, NotNegotiatedError, "dropout_p=0.1"),
    "context parallelism": ({"parallel_config": object()}, NotNegotiatedError, "context parallelism"),
    "a soft cap": ({"attention_kwargs": {"softcap": 30.0}}, NotNegotiatedError, "'softcap'"),
    "a window": ({"attention_kwargs": {"window_size": (4, 4)}}, NotNegotiatedError, "'window_size'"),
    "an argument of another": ({"attention_kwargs": {"deterministic": True}}, NotNegotiatedError, "'deterministic'"),
    "an argument of nobody": ({"attention_kwargs": {"chunk": 8}}, NotNegotiatedError, "'chunk'"),
    "both": ({"is_causal": True, "attn_mask": MASK.bool()}, NotNegotiatedError, "is_causal=True and an attn_mask"),
    "a mask of numbers": ({"attn_mask": MASK}, TensorError, "an attn_mask of"),
    "a backend": ({"backend": "torch/flex"}, NoBackendError, "torch/flex"),
}


@pytest.mark.parametrize(("arguments", "error", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_no_backend_serves_is_an_error_by_name(arguments, error, problem, dispatched) -> None:
    with pytest.raises(error, match=problem):
        dispatched(*tensors((2, 12, 4, 64)), **arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"backend": "flashinfer"}, "no backend serves head_size=64"),
        ({"attn_mask": torch.randn(12, 12).requires_grad_()}, "a mask that requires a gradient"),
    ],
)
def test_the_native_backend_runs_it_where_that_was_requested(arguments, reason, dispatch, dispatched, runs) -> None:
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    inputs, backend = tensors((2, 12, 4, 64)), arguments.pop("backend", None)

    found = dispatched(*inputs, backend=backend, native_fallback=True, **arguments)

    assert not runs
    torch.testing.assert_close(found, dispatch.dispatch_attention_fn(*inputs, **arguments), rtol=0, atol=0)
    reasons = attention_for(backend, None, native_fallback=True).fallback.reasons
    assert any(one.startswith(reason) for one in reasons)


@pytest.mark.parametrize("shape", [(12, 12), (2, 12), (2, 4, 12, 12)])
def test_a_mask_of_more_digits_than_the_call_is_not_rounded(shape, dispatch, dispatched, runs) -> None:
    inputs, mask = tensors((2, 12, 4, 64), dtype=torch.bfloat16), torch.randn(shape)

    with pytest.raises(NotNegotiatedError, match=r"an added mask of torch\.float32 was given to a call in"):
        dispatched(*inputs, attn_mask=mask)
    found = dispatched(*inputs, attn_mask=mask, native_fallback=True)

    assert not runs
    torch.testing.assert_close(found, dispatch.dispatch_attention_fn(*inputs, attn_mask=mask), rtol=0, atol=0)
    assert dispatched(*inputs, attn_mask=mask.bfloat16()).dtype == torch.bfloat16
    assert runs


def test_dropout_runs_natively_where_that_was_requested(dispatch, dispatched, runs) -> None:
    inputs = tensors((2, 12, 4, 64))

    torch.manual_seed(0)
    found = dispatched(*inputs, native_fallback=True, dropout_p=0.5)
    torch.manual_seed(0)
    wanted = dispatch.dispatch_attention_fn(*inputs, dropout_p=0.5)

    assert not runs
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("fallback", "python_calls"), [(False, 44), (True, 62)])
def test_a_repeated_call_costs_the_host_little(fallback, python_calls, dispatched) -> None:
    inputs = tensors((1, 12, 4, 64))

    assert_costs_at_most(lambda: dispatched(*inputs, native_fallback=fallback), python_calls, operations=12)


def test_a_fallback_follows_the_scope(dispatched, runs) -> None:
    inputs = tensors((2, 12, 4, 64))
    dispatched(*inputs, native_fallback=True)
    assert len(runs) == 1
    with attnplug.using(backend="flashinfer"):
        dispatched(*inputs, native_fallback=True)
    assert len(runs) == 1
    dispatched(*inputs, native_fallback=True)
    assert len(runs) == 2


PADDING = {
    "of each sequence": MASK.bool()[:, None, None, :],
    "of all sequences": MASK[1:].bool()[:, None, None, :],
    "of two axes": MASK.bool(),
    "in the middle": MASK.bool().roll(-9, 1)[:, None, None, :],
    "none": torch.ones(2, 1, 1, 12, dtype=torch.bool),
    "all of a sequence": torch.arange(24).view(2, 1, 1, 12) > 11,
}


@pytest.mark.parametrize("mask", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_keys_that_a_mask_hides_are_left_out(mask, mode, dispatch, dispatched, runs) -> None:
    inputs = [one.requires_grad_(mode is torch.enable_grad) for one in tensors((2, 30, 4, 64), (2, 12, 4, 64))]

    with mode():
        found = dispatched(*inputs, attn_mask=mask.clone())
        wanted = dispatch.dispatch_attention_fn(*inputs, attn_mask=mask)

    (run,) = runs
    assert not run.agreement.requirements.custom_mask
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    if mode is torch.enable_grad:
        grads = torch.autograd.grad(found.square().sum(), inputs)
        for one, other in zip(grads, torch.autograd.grad(wanted.square().sum(), inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_keys_are_left_out_in_a_compiled_graph(learns, dispatch, runs) -> None:
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    inputs, mask = tensors((2, 30, 4, 64), (2, 12, 4, 64)), MASK.bool()[:, None, None, :]
    inputs[0].requires_grad_(learns)
    member = attention_for("torch/sdpa", None, native_fallback=True).member

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query, key, value, mask):
        return dispatch.dispatch_attention_fn(query * 2, key, value, mask, backend=member) + 1

    for one in (mask, mask.roll(3, 3)):
        found = model(*inputs, one)
        wanted = dispatch.dispatch_attention_fn(inputs[0] * 2, *inputs[1:], attn_mask=one) + 1
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    # With gradients the backend has the mask: an op that reads it has none.
    assert [run.agreement.requirements.custom_mask for run in runs] == [learns] * 2


def test_a_mask_by_key_without_grouped_heads_is_checked(dispatched) -> None:
    with pytest.raises(TensorError, match="without enable_gqa"):
        dispatched(*tensors((2, 30, 4, 64), (2, 12, 2, 64)), attn_mask=MASK.bool())


def test_a_mask_by_key_with_more_values_than_keys_is_checked(dispatched) -> None:
    query, key, _ = tensors((2, 30, 4, 64), (2, 12, 4, 64))

    with pytest.raises(TensorError, match="as many values as keys"):
        dispatched(query, key, torch.randn(2, 13, 4, 64), attn_mask=MASK.bool())


AUTOCAST = {
    "no mask": None,
    "by key": MASK.bool(),
    "added": torch.randn(2, 1, 30, 12),
}


@pytest.mark.parametrize("mask", AUTOCAST.values(), ids=AUTOCAST)
@pytest.mark.parametrize("fallback", [False, True])
def test_autocast_casts_as_it_does_for_the_native_backend(mask, fallback, dispatch, dispatched, runs) -> None:
    query, key, value = tensors((2, 30, 4, 64), (2, 12, 4, 64))
    inputs = (query, key.half(), value.bfloat16())  # a norm in float32 leaves such a mixture

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = dispatched(*inputs, attn_mask=mask, native_fallback=fallback)
        wanted = dispatch.dispatch_attention_fn(*inputs, attn_mask=mask)

    (run,) = runs
    assert run.agreement.requirements.dtype == "bfloat16"
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_metadata_is_kept_for_a_mask_by_key(dispatched, monkeypatch) -> None:
    from attnplug.dense import BatchPlanner  # noqa: PLC0415 - imports torch

    builds, build = [], BatchPlanner.build
    monkeypatch.setattr(BatchPlanner, "build", lambda self, batch: (builds.append(batch), build(self, batch))[1])
    inputs, mask = tensors((2, 30, 4, 64), (2, 12, 4, 64)), MASK.bool()

    first = dispatched(*inputs, attn_mask=mask)
    dispatched(*inputs, attn_mask=mask)
    assert len(builds) == 1
    mask[0, 3:] = False
    assert not torch.equal(dispatched(*inputs, attn_mask=mask), first)
    assert len(builds) == 2


def test_settings_with_options_have_their_own_name(dispatched) -> None:
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    members = [
        attention_for(backend, options, native_fallback=fallback).member.value
        for backend, options, fallback in (
            (None, None, False), ("torch", None, False), (["torch"], {}, False), ("torch", {"a": {"b": 1}}, False),
            (None, None, True),
        )
    ]  # fmt: skip

    assert members == [
        "attnplug", "attnplug:torch", "attnplug:torch", 'attnplug:torch{"a": {"b": 1}}', "attnplug or native"
    ]  # fmt: skip


@pytest.mark.parametrize("mask", [None, MASK.bool()], ids=["no mask", "padding"])
def test_options_reach_the_backend(mask, dispatched) -> None:
    inputs = tensors((2, 40, 4, 64), (2, 12, 4, 64))

    with pytest.raises(SettingsError, match="no_such_option"):
        dispatched(*inputs, attn_mask=mask, backend="torch", options={"torch": {"no_such_option": 1}})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["flashinfer", None])
def test_a_fallback_is_decided_when_a_graph_is_traced(backend, dispatch, runs) -> None:
    inputs = tensors((2, 12, 4, 64))
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    member = attention_for(backend, None, native_fallback=True).member
    call = torch.compile(
        lambda *given: dispatch.dispatch_attention_fn(*given, backend=member), fullgraph=True, backend="eager"
    )

    found = call(*inputs)

    assert bool(runs) is (backend is None)
    torch.testing.assert_close(found, dispatch.dispatch_attention_fn(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [2, 4])
def test_a_mask_by_key_that_changes_unseen_is_read_again(axes, dispatched) -> None:
    inputs, mask, other = tensors((2, 9, 4, 64)), torch.rand(2, 9) > 0.5, torch.rand(2, 9) > 0.5
    if axes == 4:
        mask, other = mask[:, None, None].contiguous(), other[:, None, None].contiguous()

    dispatched(*inputs, attn_mask=mask)
    mask.numpy()[:] = other.numpy()

    assert torch.equal(dispatched(*inputs, attn_mask=mask), dispatched(*inputs, attn_mask=other))
