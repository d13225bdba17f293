"""Functions of FlashAttention's shape against the float64 oracle: packed, and over pages."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.dense import flash_attn_varlen_func, flash_attn_with_kvcache
from attnplug.errors import NoBackendError, NotNegotiatedError, TensorError
from core.tests.dense.flash_reference import HEADS, KV_HEADS, SIZE, expected, paged_of, starts_of

WINDOWS = st.one_of(
    st.just((-1, -1)), st.tuples(st.integers(0, 9), st.just(0)), st.integers(0, 9).map(lambda w: (w, w))
)


@st.composite
def packed(draw, is_paged):
    """Lengths, where causal queries never outnumber keys, and features."""
    causal = draw(st.booleans())
    window = draw(WINDOWS.filter(lambda sides: causal or not is_paged or sides[1] <= 0))
    sequences = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 13)), min_size=1, max_size=4))
    # Causal queries are at most as many as keys; a window of two sides is over one sequence's own tokens.
    is_causal = causal or window[1] == 0
    lengths = [(min(q, k), k) if is_causal or is_paged else (q if k else 0, k) for q, k in sequences]
    if not is_causal and window[0] >= 0 and not is_paged:
        lengths = [(k, k) for _, k in sequences]
    features = {"causal": causal, "window_size": window, "softcap": draw(st.sampled_from([0.0, 3.0]))}
    features["softmax_scale"] = draw(st.sampled_from([None, 0.9]))
    return lengths, features, draw(st.booleans()), draw(st.integers(0, 2**16))


@given(data=st.data())
@pytest.mark.parametrize("is_paged", [False, True])
def test_packed_calls_are_those_of_the_oracle(is_paged, data):
    lengths, features, has_sinks, seed = data.draw(packed(is_paged))
    generator = torch.Generator().manual_seed(seed)
    queries, keys = ([pair[side] for pair in lengths] for side in (0, 1))
    query = torch.randn(sum(queries), HEADS, SIZE, generator=generator)
    key, value = (torch.randn(sum(keys), KV_HEADS, SIZE, generator=generator) for _ in range(2))
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    starts = (starts_of(queries), starts_of(keys))
    given_kv = paged_of(key, value, keys, generator) if is_paged else (key, value, None)

    output, lse = flash_attn_varlen_func(
        query, *given_kv[:2], *starts, max(queries), max(keys), **features, s_aux=sinks, block_table=given_kv[2],
        return_softmax_lse=True,
    )  # fmt: skip

    scale = features.pop("softmax_scale")
    assert (output.shape, lse.shape) == (query.shape, (HEADS, len(query)))
    for (a, b), (c, d) in zip(*(pairwise(one.tolist()) for one in starts), strict=True):
        if a < b:
            wanted, wanted_lse = expected(query[a:b], key[c:d], value[c:d], sinks=sinks, scale=scale, **features)
            torch.testing.assert_close(output[a:b].double(), wanted, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(lse[:, a:b].T.double(), wanted_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("is_paged", [False, True])
def test_alibi_slopes_are_those_of_the_oracle(is_paged):
    key, value = (torch.randn(9, KV_HEADS, SIZE) for _ in range(2))
    query, slopes = torch.randn(4, HEADS, SIZE), torch.rand(HEADS)
    *pages, table = paged_of(key, value, [9], None) if is_paged else (key, value, None)

    output = flash_attn_varlen_func(
        query, *pages, starts_of([4]), starts_of([9]), causal=True, alibi_slopes=slopes, block_table=table
    )

    wanted, _ = expected(query, key, value, causal=True, slopes=slopes)
    torch.testing.assert_close(output.double(), wanted, atol=2e-5, rtol=2e-5)


def test_gradients_flow_through_packed_calls():
    query, key, value = (torch.randn(5, HEADS, SIZE, requires_grad=True) for _ in range(3))
    starts = starts_of([2, 3])

    flash_attn_varlen_func(query, key, value, starts, starts, 3, 3, causal=True).sum().backward()

    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in (query, value))


REFUSED = {
    "dropout": ({"dropout_p": 0.1}, NotNegotiatedError, "drop no weights"),
    "weights": ({"return_attn_probs": True}, NotNegotiatedError, "return_softmax_lse"),
    "window": ({"window_size": (3, 1)}, NotNegotiatedError, "equal sides"),
    "no pair": ({"window_size": 3}, TensorError, "left, right"),
    "slopes": ({"alibi_slopes": torch.ones(2, HEADS)}, NotNegotiatedError, "same slopes"),
    "bound": ({"max_seqlen_q": 2}, TensorError, "max_seqlen_q=2"),
    "bound of keys": ({"max_seqlen_k": 2}, TensorError, "max_seqlen_k=2"),
    "no bound": ({"max_seqlen_q": "5"}, TensorError, "whole number"),
    "two sinks": ({"s_aux": torch.ones(HEADS), "learnable_sink": torch.ones(HEADS)}, TensorError, "two names"),
    "backend": ({"backend": "flash_attn/fa2"}, NoBackendError, "float32"),
}


@pytest.mark.parametrize(("arguments", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_no_backend_takes_is_refused(arguments, error, words):
    query, starts = torch.randn(5, HEADS, SIZE), starts_of([5])

    with pytest.raises(error, match=words):
        flash_attn_varlen_func(query, query, query, starts, starts, **{"max_seqlen_q": 5, **arguments})


def test_deterministic_is_refused_where_gradients_are_recorded():
    query, starts = torch.randn(5, HEADS, SIZE), starts_of([5])
    assert flash_attn_varlen_func(query, query, query, starts, starts, deterministic=True).shape == query.shape

    with pytest.raises(NotNegotiatedError, match="deterministic=True"):
        flash_attn_varlen_func(query.requires_grad_(), query, query, starts, starts, deterministic=True)


def test_queries_of_no_sequence_are_refused():
    key, value = (torch.randn(9, KV_HEADS, SIZE) for _ in range(2))
    *pages, table = paged_of(key, value, [9], None)

    for blocks in (None, table):
        given_kv = (key, value) if blocks is None else pages
        with pytest.raises(TensorError, match="ends at 4"):
            flash_attn_varlen_func(
                torch.randn(5, HEADS, SIZE), *given_kv, starts_of([4]), starts_of([9]), block_table=blocks
            )


def test_a_sequence_without_keys_has_output_0():
    query, key = torch.randn(5, HEADS, SIZE, requires_grad=True), torch.randn(4, KV_HEADS, SIZE)

    output, lse = flash_attn_varlen_func(query, key, key, starts_of([3, 2]), starts_of([0, 4]), return_softmax_lse=True)

    wanted, _ = expected(query[3:], key, key, causal=False)
    assert not output[:3].any()
    assert lse[:, :3].eq(-torch.inf).all()
    torch.testing.assert_close(output[3:].double(), wanted, atol=2e-5, rtol=2e-5)
    (found,) = torch.autograd.grad(output.sum(), query)
    assert not found[:3].any()
    assert not found.isnan().any()


def test_a_cpu_copy_of_other_lengths_is_refused():
    query = torch.randn(5, HEADS, SIZE)

    with pytest.raises(TensorError, match="cu_seqlens_q and a CPU copy of other lengths"):
        flash_attn_varlen_func(
            query, query, query, starts_of([2, 3]), starts_of([2, 3]), cu_seqlens_q_cpu=starts_of([3, 2])
        )


def test_lengths_that_torch_does_not_see_change_are_read_anew():
    query, array = torch.randn(5, HEADS, SIZE), starts_of([2, 3]).numpy()
    starts = torch.from_numpy(array)

    for middle in (2, 3):
        array[1] = middle
        output = flash_attn_varlen_func(query, query, query, starts, starts, causal=True)
        wanted = [expected(*[query[rows]] * 3, causal=True)[0] for rows in (slice(middle), slice(middle, 5))]
        torch.testing.assert_close(output.double(), torch.cat(wanted), atol=2e-5, rtol=2e-5)


def test_the_arguments_are_those_of_flash_attn():
    """The names and the order of FlashAttention 2.8, whose positional calls keep their meaning."""
    varlen, cache = (
        [name for name, one in inspect.signature(function).parameters.items() if one.kind == one.POSITIONAL_OR_KEYWORD]
        for function in (flash_attn_varlen_func, flash_attn_with_kvcache)
    )

    assert varlen == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale",
        "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "block_table",
    ]  # fmt: skip
    assert cache == [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
        "alibi_slopes", "num_splits", "return_softmax_lse",
    ]  # fmt: skip
