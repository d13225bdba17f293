"""`attend_like_sdpa` beside torch's function, computed in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnplug.dense import attend_like_sdpa, autocast_like_sdpa
from attnplug.dense.params import encode_keywords
from attnplug.errors import LayerError, NoBackendError, NotNegotiatedError, SettingsError, TensorError
from attnplug.torch_backend.impl import TorchImpl
from core.tests.dense.counting import assert_costs_at_most


def tensors(queries=(2, 4, 9, 16), keys=None, **more):
    shapes = (queries, keys or queries, keys or queries)
    return [torch.randn(shape, **more) for shape in shapes]


def reference(query, key, value, attn_mask=None, **arguments):
    """Return torch's result in float64, by its own operations: its fused operators are of float32 as well."""
    mask = attn_mask.double() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    return sdpa(query.double(), key.double(), value.double(), mask, **arguments)


def log_sum_exp(query, key, mask):
    scores = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).logsumexp(-1)


@pytest.fixture
def runs(monkeypatch):
    """Return the runs of the built-in backend."""
    made, run = [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *given: (made.append(self), run(self, *given))[1])
    return made


@pytest.mark.parametrize(
    ("queries", "keys", "arguments", "calls"),
    [
        ((2, 4, 9, 16), (2, 4, 9, 16), {}, 1),
        ((2, 4, 9, 16), (2, 4, 5, 16), {}, 1),
        ((2, 4, 9, 16), (2, 4, 9, 16), {"is_causal": True}, 1),
        ((2, 4, 3, 16), (2, 4, 9, 16), {"is_causal": True}, 1),
        ((2, 4, 9, 16), (2, 4, 3, 16), {"is_causal": True}, 2),
        ((2, 4, 9, 16), (2, 2, 9, 16), {"enable_gqa": True}, 1),
        ((2, 4, 9, 16), (2, 1, 9, 16), {}, 1),
        ((2, 4, 9, 16), (2, 4, 9, 16), {"scale": 0.7, "dropout_p": 0.0}, 1),
    ],
)
def test_a_call_is_that_of_torch(queries, keys, arguments, calls, runs) -> None:
    inputs = tensors(queries, keys)

    found = attend_like_sdpa(*inputs, **arguments)

    assert len(runs) == calls
    torch.testing.assert_close(found.double(), reference(*inputs, **arguments), rtol=1e-5, atol=1e-5)


# Python calls and operations, see `test_attention`.
COSTS = {
    "plain": ({}, 26, 13),
    "causal": ({"is_causal": True}, 26, 13),
    "with the LSE": ({"return_lse": True}, 27, 19),
    "tokens first": ({"tokens_first": True}, 26, 12),
    "boolean mask": ({"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, 41, 18),
    "additive mask": ({"attn_mask": torch.zeros(9, 9)}, 52, 21),
}


@pytest.mark.parametrize(("arguments", "python_calls", "operations"), COSTS.values(), ids=COSTS)
def test_a_repeated_call_costs_the_host_little(arguments, python_calls, operations) -> None:
    shape = (1, 9, 4, 16) if "tokens_first" in arguments else (1, 4, 9, 16)
    inputs = tensors(shape)

    assert_costs_at_most(lambda: attend_like_sdpa(*inputs, **arguments), python_calls, operations)


@pytest.mark.parametrize("keys", [3, 9, 12])
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"tokens_first": True}], ids=str)
def test_a_repeated_call_is_the_first_one(keys, arguments) -> None:
    """More keys than causal queries are cut, and more queries than keys are two calls."""
    inputs = tensors((2, 4, 9, 16), (2, 4, keys, 16))
    if "tokens_first" in arguments:
        inputs = [one.transpose(1, 2).contiguous() for one in inputs]
    first = attend_like_sdpa(*inputs, **arguments)

    for _ in range(2):
        assert torch.equal(attend_like_sdpa(*inputs, **arguments), first)


MASKS = {
    "boolean of each batch": lambda: torch.rand(2, 1, 9, 5) > 0.3,
    "boolean of each head": lambda: torch.rand(2, 4, 9, 5) > 0.3,
    "boolean of each head, for all": lambda: torch.rand(4, 9, 5) > 0.3,
    "boolean by key": lambda: torch.rand(2, 1, 1, 5) > 0.3,
    "added": lambda: torch.randn(2, 4, 9, 5),
    "added, for all": lambda: torch.randn(9, 5),
    "added by key": lambda: torch.randn(2, 1, 1, 5),
    "added by query": lambda: torch.randn(1, 4, 9, 1),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_masks_have_any_shape_that_torch_expands(mask, tokens_first, runs) -> None:
    inputs, mask = tensors((2, 4, 9, 16), (2, 4, 5, 16)), mask()

    given = [one.transpose(1, 2) for one in inputs] if tokens_first else inputs
    found = attend_like_sdpa(*given, mask, tokens_first=tokens_first)

    assert len(runs) == 1
    found = found.transpose(1, 2) if tokens_first else found
    torch.testing.assert_close(found.double(), reference(*inputs, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_query_that_attends_to_nothing_has_output_0(heads, is_added) -> None:
    inputs = [one.requires_grad_() for one in tensors((2, 4, 6, 16), (2, 4, 5, 16))]
    visible = torch.rand(2, heads, 6, 5) > 0.3
    visible[0, 0, 2] = visible[1, -1, 5] = False
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) if is_added else visible

    found, lse = attend_like_sdpa(*inputs, mask, return_lse=True)

    torch.testing.assert_close(found.double(), reference(*inputs, visible), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), log_sum_exp(inputs[0], inputs[1], visible), rtol=1e-5, atol=1e-5)
    assert not found[0, 0, 2].any()
    grads = torch.autograd.grad(found.square().sum(), inputs)
    wanted = torch.autograd.grad(reference(*inputs, visible).square().sum(), inputs)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), st.booleans(),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_causal_queries_begin_at_the_first_key(
    batch, kv_heads, group, queries, keys, causal, tokens_first, seed
) -> None:
    torch.manual_seed(seed)
    inputs = tensors((batch, kv_heads * group, queries, 8), (batch, kv_heads, keys, 8))
    given = [one.transpose(1, 2) for one in inputs] if tokens_first else inputs

    output, lse = attend_like_sdpa(
        *given, is_causal=causal, enable_gqa=True, return_lse=True, tokens_first=tokens_first
    )

    output, lse = (output.transpose(1, 2), lse.transpose(1, 2)) if tokens_first else (output, lse)
    wanted = reference(*inputs, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    wanted = log_sum_exp(inputs[0], inputs[1].repeat_interleave(group, 1), visible.tril() if causal else visible)
    torch.testing.assert_close(lse.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        ({"dropout_p": 0.1}, NotNegotiatedError, "dropout_p=0.1"),
        (
            {"is_causal": True, "attn_mask": torch.ones(9, 9, dtype=torch.bool)},
            NotNegotiatedError,
            "is_causal=True and",
        ),
        ({"attn_mask": torch.ones(9, 9, dtype=torch.int64)}, TensorError, "an attn_mask of"),
        ({"attn_mask": torch.ones(9, 8, dtype=torch.bool)}, TensorError, "an attn_mask of"),
        ({"attn_mask": torch.ones(1, 1, 1, 9, 9)}, TensorError, "an attn_mask of"),
        ({"attn_mask": torch.ones(9, dtype=torch.bool)}, TensorError, "an attn_mask of"),
        ({"scale": float("nan")}, LayerError, "scale"),
        ({"backend": "flashinfer"}, NoBackendError, "flashinfer"),
    ],
)
def test_what_cannot_be_served_is_refused(given, error, problem) -> None:
    with pytest.raises(error, match=problem) as caught:
        attend_like_sdpa(*tensors(), **given)

    assert "\n  fix: " in str(caught.value)


def test_tensors_of_other_axes_and_heads_are_refused() -> None:
    with pytest.raises(TensorError, match=r"each is \(batch, heads, tokens, size\)"):
        attend_like_sdpa(*tensors((4, 9, 16)))
    with pytest.raises(TensorError, match=r"each is \(batch, tokens, heads, size\)"):
        attend_like_sdpa(*tensors((4, 9, 16)), tokens_first=True)
    with pytest.raises(TensorError, match=r"4 query heads and 2 key and value heads .* without enable_gqa"):
        attend_like_sdpa(*tensors((2, 4, 9, 16), (2, 2, 9, 16)))


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_tensors_are_cast_as_autocast_casts_them(mask, dtype) -> None:
    inputs = (torch.randn(2, 4, 9, 16), *tensors(dtype=dtype)[1:])
    given = None if mask is None else (torch.rand(9, 9) > 0.3).to(mask)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = autocast_like_sdpa(*inputs, given)
        with torch.autocast("cpu", enabled=False):
            assert autocast_like_sdpa(*inputs, given) == (*inputs, given)
    expected = [torch.bfloat16, *[torch.float64 if dtype == torch.float64 else torch.bfloat16] * 2]

    assert [one.dtype for one in cast[:3]] == expected
    assert cast[3] is None if mask is None else cast[3].dtype == (torch.bool if mask == torch.bool else torch.bfloat16)
    assert autocast_like_sdpa(*inputs, given) == (*inputs, given)
    if dtype == torch.float64:
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = sdpa(*inputs, given)
    torch.testing.assert_close(attend_like_sdpa(*cast), wanted, rtol=2e-2, atol=2e-2)


def test_a_meta_tensor_has_no_autocast() -> None:
    inputs = tensors(device="meta")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_like_sdpa(*inputs)[0] is inputs[0]


def test_a_compiled_graph_has_no_break(runs) -> None:
    inputs, mask = tensors((2, 4, 9, 16), (2, 4, 5, 16)), torch.rand(2, 4, 9, 5) > 0.3

    @torch.compile(fullgraph=True, backend="eager")
    def model(query, key, value, mask):
        masked = attend_like_sdpa(query, key, value, mask)
        return masked + attend_like_sdpa(query, key, value, is_causal=True)

    with torch.no_grad():
        found = model(*inputs, mask)

    assert len(runs) == 3
    wanted = reference(*inputs, mask) + reference(*inputs, is_causal=True)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch/sdpa", ["torch/sdpa"], ("torch/sdpa",)])
@pytest.mark.parametrize("options", [None, {}])
def test_a_named_backend_is_encoded_alike(backend, options) -> None:
    assert encode_keywords(backend, options) == (("torch/sdpa",), "{}")


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="backend=''"):
        encode_keywords("", None)
