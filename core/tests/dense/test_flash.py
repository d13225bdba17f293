"""Functions of FlashAttention's shape against the float64 oracle: packed, paged, and with a KV cache in place."""

from __future__ import annotations

import inspect
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug.dense import flash_attn_varlen_func, flash_attn_with_kvcache
from attnplug.errors import CacheError, LimitsError, NoBackendError, NotNegotiatedError, TensorError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_kit.oracle import attend

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
WINDOWS = st.one_of(
    st.just((-1, -1)), st.tuples(st.integers(0, 9), st.just(0)), st.integers(0, 9).map(lambda w: (w, w))
)


def starts_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def expected(query, key, value, *, causal, window_size=(-1, -1), softcap=0.0, sinks=None, slopes=None):
    """Return the oracle's output and LSE of one sequence."""
    left, right = window_size
    causal = causal or right == 0
    found = attend(
        query.double(), key.double(), value.double(), scale=query.shape[-1] ** -0.5, causal=causal,
        window=(left, 0 if causal else right) if left >= 0 else (-1, -1), logits_soft_cap=softcap or None,
        sinks=None if sinks is None else sinks.double(), alibi=None if slopes is None else "linear",
        alibi_slopes=slopes,
    )  # fmt: skip
    return found.output, found.lse_with_sink


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
    return lengths, features, draw(st.booleans()), draw(st.integers(0, 2**16))


def paged_of(keys, values, lengths, generator, spare=2):
    """Return pages with a block table that permutes them, block 0 included."""
    rows = [-(-length // BLOCK) for length in lengths]
    count, width = sum(rows) + spare, max(*rows, 1)
    order = torch.randperm(count, generator=generator).tolist()
    pools = [torch.full((count, BLOCK, *one.shape[1:]), float("nan")) for one in (keys, values)]
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    begin = 0
    for index, length in enumerate(lengths):
        for block in range(rows[index]):
            table[index, block] = order.pop()
            here = slice(begin + block * BLOCK, begin + min(length, (block + 1) * BLOCK))
            for pool, one in zip(pools, (keys, values), strict=True):
                pool[table[index, block], : here.stop - here.start] = one[here]
        begin += length
    return (*(pool.nan_to_num_(0) for pool in pools), table)


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

    assert (output.shape, lse.shape) == (query.shape, (HEADS, len(query)))
    for (a, b), (c, d) in zip(*(pairwise(one.tolist()) for one in starts), strict=True):
        if a < b:
            wanted, wanted_lse = expected(query[a:b], key[c:d], value[c:d], sinks=sinks, **features)
            torch.testing.assert_close(output[a:b].double(), wanted, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(lse[:, a:b].T.double(), wanted_lse, atol=2e-5, rtol=2e-5)


@given(
    before=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    new=st.integers(0, 5),
    window=st.integers(0, 6),
    is_paged=st.booleans(),
    has_sinks=st.booleans(),
)
def test_a_kv_cache_is_written_in_place_and_attended_to(before, new, window, is_paged, has_sinks):
    torch.manual_seed(len(before) * 100 + new)
    capacity, after = 16, [length + new for length in before]
    queries = new or 1
    if not new:
        before = after = [length + 1 for length in before]
    key, value = (torch.randn(len(before), capacity, KV_HEADS, SIZE) for _ in range(2))
    k, v = (torch.randn(len(before), new, KV_HEADS, SIZE) for _ in range(2)) if new else (None, None)
    query, sinks = torch.randn(len(before), queries, HEADS, SIZE), torch.randn(HEADS) if has_sinks else None
    caches, table = [key.clone(), value.clone()], None
    if is_paged:
        table = torch.randperm(len(before) * 4).view(len(before), 4).to(torch.int32)
        caches = [torch.zeros(len(before) * 4, BLOCK, KV_HEADS, SIZE) for _ in range(2)]
        for cache, whole in zip(caches, (key, value), strict=True):
            cache[table.long()] = whole.view(len(before), 4, BLOCK, KV_HEADS, SIZE)

    output, lse = flash_attn_with_kvcache(
        query, *caches, k, v, cache_seqlens=torch.tensor(before, dtype=torch.int32), block_table=table, causal=True,
        window_size=(window, 0), s_aux=sinks, return_softmax_lse=True,
    )  # fmt: skip

    for row, (start, end) in enumerate(zip(before, after, strict=True)):
        wholes = []
        for whole, one, cache in zip((key, value), (k, v), caches, strict=True):
            wanted = whole[row].clone()
            if one is not None:
                wanted[start:end] = one[row]
            found = cache[row] if table is None else cache[table[row].long()].flatten(0, 1)
            assert torch.equal(found, wanted)
            wholes.append(wanted[:end])
        wanted, wanted_lse = expected(query[row], *wholes, causal=True, window_size=(window, 0), sinks=sinks)
        torch.testing.assert_close(output[row].double(), wanted, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[row].T.double(), wanted_lse, atol=2e-5, rtol=2e-5)


def cached(sequences=2, capacity=16, **more):
    keys, values = (torch.randn(sequences, capacity, KV_HEADS, SIZE, **more) for _ in range(2))
    return torch.randn(sequences, 1, HEADS, SIZE, **more), keys, values


def test_rows_of_a_cache_are_chosen_by_their_numbers():
    query, keys, values = cached()
    keys, values = (torch.randn(5, 10, KV_HEADS, SIZE) for _ in range(2))  # no multiple of 16: a row is a page

    output = flash_attn_with_kvcache(query, keys, values, cache_seqlens=7, cache_batch_idx=torch.tensor([3, 0]))

    for one, row in enumerate((3, 0)):
        wanted, _ = expected(query[one], keys[row, :7], values[row, :7], causal=False)
        torch.testing.assert_close(output[one].double(), wanted, atol=2e-5, rtol=2e-5)


def test_a_cache_without_lengths_is_full():
    query, keys, values = cached()

    output = flash_attn_with_kvcache(query, keys, values)

    wanted = [expected(query[one], keys[one], values[one], causal=False)[0] for one in range(2)]
    torch.testing.assert_close(output.double(), torch.stack(wanted), atol=2e-5, rtol=2e-5)


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


CACHE_REFUSED = {
    "rotary": ({"rotary_cos": torch.ones(4, 4)}, NotNegotiatedError, "rotary"),
    "rotary sines": ({"rotary_sin": torch.ones(4, 4)}, NotNegotiatedError, "rotary"),
    "left padding": ({"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, NotNegotiatedError, "beginning"),
    "window": ({"window_size": (2, 2)}, NotNegotiatedError, "ends at its query"),
    "full": ({"cache_seqlens": 16}, TensorError, "17 keys"),
    "no lengths": ({"cache_seqlens": None}, TensorError, "cache_seqlens"),
    "wrong lengths": ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, TensorError, "cache_seqlens of shape"),
    "no number": ({"cache_seqlens": -1}, TensorError, "cache_seqlens=-1"),
    "no values": ({"v": None}, TensorError, "one of k and v"),
    "heads": ({"v": torch.ones(2, 1, 1, SIZE)}, TensorError, "as many new keys as new values"),
    "dtype": ({"k": torch.ones(2, 1, KV_HEADS, SIZE).double()}, TensorError, "the dtype"),
    "bound": ({"max_seqlen_k": 3}, TensorError, "max_seqlen_k"),
    "block": ({"block_table": torch.full((2, 1), 7, dtype=torch.int32)}, CacheError, "7"),
    "rows and pages": (
        {"block_table": torch.zeros(2, 1, dtype=torch.int32), "cache_batch_idx": torch.arange(2)},
        TensorError,
        "cache_batch_idx",
    ),
    "backend": ({"backend": "flash_attn/fa2"}, NoBackendError, "float32"),
}


@pytest.mark.parametrize(("arguments", "error", "words"), CACHE_REFUSED.values(), ids=CACHE_REFUSED)
def test_a_refused_call_leaves_the_cache_as_it_was(arguments, error, words):
    query, keys, values = cached()
    caches, new = (keys.clone(), values.clone()), torch.ones(2, 1, KV_HEADS, SIZE)

    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(query, *caches, **{"k": new, "v": new, "cache_seqlens": 4, **arguments})

    assert torch.equal(caches[0], keys)
    assert torch.equal(caches[1], values)


def test_gradients_through_a_cache_are_refused():
    query, keys, values = cached(requires_grad=True)

    with pytest.raises(NotNegotiatedError, match="record gradients"):
        flash_attn_with_kvcache(query, keys, values, cache_seqlens=4)


def test_a_limit_of_splits_is_kept_or_refused():
    query, keys, values = cached()
    wanted = flash_attn_with_kvcache(query, keys, values, cache_seqlens=9)
    try:
        found = flash_attn_with_kvcache(query, keys, values, cache_seqlens=9, num_splits=1)
    except LimitsError as error:
        assert "max_num_splits" in str(error)  # noqa: PT017 - either outcome is right, and checked
    else:
        torch.testing.assert_close(found, wanted)


def test_a_decision_is_kept_in_its_scope(monkeypatch):
    implementations, run = [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *given: (implementations.append(self), run(self, *given))[1])
    query, keys, values = cached()

    flash_attn_with_kvcache(query, keys, values, cache_seqlens=4)
    flash_attn_with_kvcache(query, keys, values, cache_seqlens=5)
    with attnplug.using(backend="flash_attn/fa2"), pytest.raises(NoBackendError, match="flash_attn/fa2"):
        flash_attn_with_kvcache(query, keys, values, cache_seqlens=5)

    assert len(implementations) == 2
    assert implementations[0] is implementations[1]


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
