"""`flash_attn_with_kvcache` against the float64 oracle, and what it refuses before it writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug.dense import clear_decisions, flash_attn_with_kvcache, flash_cache
from attnplug.errors import (
    CacheError,
    LayerError,
    LimitsError,
    NoBackendError,
    NotNegotiatedError,
    RequirementsError,
    TensorError,
)
from attnplug.torch_backend.impl import TorchImpl
from core.tests.dense.flash_reference import BLOCK, HEADS, KV_HEADS, SIZE, cached, expected


@pytest.fixture(autouse=True)
def _afresh():
    clear_decisions()  # a test may have changed what the kept implementations are


@given(
    before=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    new=st.integers(0, 5),
    window=st.integers(0, 6),
    is_paged=st.booleans(),
    has_sinks=st.booleans(),
    has_slopes=st.booleans(),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.9]),
    softcap=st.sampled_from([0.0, 2.0]),
)
def test_a_kv_cache_is_written_in_place_and_attended_to(  # noqa: PLR0917 - one for each thing that is drawn
    before, new, window, is_paged, has_sinks, has_slopes, causal, scale, softcap
):
    has_slopes = has_slopes and not (has_sinks or softcap) and causal
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

    slopes = torch.rand(HEADS) if has_slopes else None
    window_size = (window, 0) if causal else (-1, -1)
    output, lse = flash_attn_with_kvcache(
        query, *caches, k, v, cache_seqlens=torch.tensor(before, dtype=torch.int32), block_table=table, causal=causal,
        window_size=window_size, s_aux=sinks, softmax_scale=scale, softcap=softcap, alibi_slopes=slopes,
        return_softmax_lse=True,
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
        wanted, wanted_lse = expected(
            query[row], *wholes, causal=causal, window_size=window_size, sinks=sinks, scale=scale, softcap=softcap,
            slopes=slopes,
        )  # fmt: skip
        torch.testing.assert_close(output[row].double(), wanted, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[row].T.double(), wanted_lse, atol=2e-5, rtol=2e-5)


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
    "length below 0": ({"cache_seqlens": torch.tensor([4, -1], dtype=torch.int32)}, TensorError, "below 0"),
    "wrapping lengths": ({"cache_seqlens": torch.tensor([4, 2**32 + 3])}, TensorError, "from 4 to 4,294,967,299"),
    "wrapping number": ({"cache_seqlens": 2**32 + 3}, TensorError, "cache_seqlens=4294967299"),
    "wrapping rows": ({"cache_batch_idx": torch.tensor([0, 2**32 + 1])}, TensorError, "cache_batch_idx with numbers"),
    "wrapping blocks": ({"block_table": torch.tensor([[2**32], [1]])}, TensorError, "block_table with numbers"),
    "lengths in float": ({"cache_seqlens": torch.tensor([4.0, 5.0])}, TensorError, "float32"),
    "table in float": ({"block_table": torch.zeros(2, 1)}, TensorError, "block_table of shape"),
    "no table": ({"block_table": torch.zeros(2, dtype=torch.int32)}, TensorError, r"it is \(2, blocks\)"),
    "no blocks": ({"block_table": torch.zeros(2, 0, dtype=torch.int32)}, TensorError, "room for 0"),
    "rows in float": ({"cache_batch_idx": torch.tensor([0.0, 1.0])}, TensorError, "cache_batch_idx"),
    "table of rows": ({"cache_batch_idx": torch.tensor([[0, 1]])}, TensorError, "cache_batch_idx of shape"),
    "row beyond": ({"cache_batch_idx": torch.tensor([0, 2])}, CacheError, "block 2"),
    "row below": ({"cache_batch_idx": torch.tensor([0, -1])}, CacheError, "block -1"),
    "row twice": ({"cache_batch_idx": torch.tensor([1, 1])}, CacheError, "slot"),
    "splits": ({"num_splits": -1}, LimitsError, "max_num_splits=-1"),
    "cap": ({"softcap": -1.0}, RequirementsError, "logits_soft_cap=-1.0"),
    "scale": ({"softmax_scale": float("nan")}, LayerError, "scale=nan"),
    "sinks": ({"s_aux": torch.ones(3)}, TensorError, "sinks"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, TensorError, "alibi_slopes"),
    "dtype of q": ({"q": torch.ones(2, 1, HEADS, SIZE).bfloat16()}, TensorError, "one dtype"),
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
        flash_attn_with_kvcache(
            k_cache=caches[0], v_cache=caches[1], **{"q": query, "k": new, "v": new, "cache_seqlens": 4, **arguments}
        )

    assert torch.equal(caches[0], keys)
    assert torch.equal(caches[1], values)


SHARED = {
    "one slot": ([[0, 1], [0, 1]], [5, 5], False),
    "keys of another": ([[0, 1], [0, 1]], [5, 7], False),
    "keys of another in a block before": ([[0, 1], [2, 0]], [2, 6], False),
    "a prefix": ([[0, 1], [0, 2]], [5, 5], True),
    "a prefix of one more block": ([[0, 1, 3], [0, 1, 2]], [9, 8], True),
}


@pytest.mark.parametrize(("table", "before", "is_served"), SHARED.values(), ids=SHARED)
def test_blocks_are_shared_by_what_is_read_alone(table, before, is_served):
    query, new = torch.randn(2, 1, HEADS, SIZE), torch.ones(2, 1, KV_HEADS, SIZE)
    caches = [torch.randn(4, BLOCK, KV_HEADS, SIZE) for _ in range(2)]
    former, slots = caches[0].clone(), set()

    def call():
        lengths = torch.tensor(before, dtype=torch.int32)
        flash_attn_with_kvcache(
            query, *caches, new, new, cache_seqlens=lengths, block_table=torch.tensor(table, dtype=torch.int32)
        )

    if is_served:
        call()
        slots = {(row[length // BLOCK], length % BLOCK) for row, length in zip(table, before, strict=True)}
    else:
        with pytest.raises(CacheError, match="another sequence"):
            call()
    written = (caches[0] != former).flatten(2).any(-1).nonzero().tolist()
    assert set(map(tuple, written)) == slots


def test_keys_without_room_have_no_slot():
    """On a device nothing is read from it, so that such a call is no error: it writes what has room."""
    table = torch.tensor([[2, 0], [1, 9], [3, -1]], dtype=torch.int32)

    slots = flash_cache.slots_of(torch.tensor([3, 7, 4]), 2, table, (4, BLOCK))
    beyond = flash_cache.slots_of(torch.tensor([7, 8, -1]), 2, table, (4, BLOCK))

    assert slots.tolist() == [[2 * BLOCK + 3, 0], [-1, -1], [-1, -1]]
    assert beyond.tolist() == [[3, -1], [-1, -1], [-1, 3 * BLOCK]]
    assert flash_cache.slots_of(torch.tensor([0]), 1, table[:1, :0], (4, BLOCK)).tolist() == [[-1]]


def test_gradients_through_a_cache_are_refused():
    query, keys, values = cached(requires_grad=True)

    with pytest.raises(NotNegotiatedError, match="record gradients"):
        flash_attn_with_kvcache(query, keys, values, cache_seqlens=4)


def test_a_limit_of_splits_reaches_the_builder(monkeypatch):
    limits, run = [], TorchImpl.run
    monkeypatch.setattr(
        TorchImpl, "run", lambda self, *given: (limits.append(given[4].state.limits), run(self, *given))[1]
    )
    query, keys, values = cached()

    wanted = flash_attn_with_kvcache(query, keys, values, cache_seqlens=9)
    found = flash_attn_with_kvcache(query, keys, values, cache_seqlens=9, num_splits=1)

    assert [one.max_num_splits for one in limits] == [None, 1]
    torch.testing.assert_close(found, wanted)


def test_sinks_join_the_lse_of_a_backend_that_leaves_them_out(monkeypatch):
    query, keys, values = cached()
    run, sinks = TorchImpl.run, torch.randn(HEADS)
    given = {"cache_seqlens": 9, "return_softmax_lse": True}
    wanted = flash_attn_with_kvcache(query, keys, values, s_aux=sinks, **given)

    def run_without(self, *arguments):
        run(self, *arguments)
        lse = arguments[6]
        lse += torch.log1p(-(sinks - lse).exp())

    monkeypatch.setattr(TorchImpl, "run", run_without)
    monkeypatch.setattr(TorchImpl, "lse_includes_sink", False)
    clear_decisions()  # an implementation says so when it is made
    found = flash_attn_with_kvcache(query, keys, values, s_aux=sinks, **given)

    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


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


@pytest.mark.parametrize("name", ["s_aux", "alibi_slopes"])
def test_sinks_and_slopes_that_change_unseen_are_read_again(name):
    query, keys, values = cached()
    given, new = torch.rand(HEADS), torch.rand(HEADS)

    def call(one):
        return flash_attn_with_kvcache(query, keys, values, cache_seqlens=9, causal=True, **{name: one})

    call(given)
    given.data.copy_(new)

    assert torch.equal(call(given), call(new))


def test_block_0_of_a_caller_has_keys(monkeypatch):
    """Kernels that need a finite null block have none here."""
    monkeypatch.setattr(TorchImpl, "needs_finite_null_block", True)
    query, keys, values = cached()
    given = {"cache_seqlens": 9, "causal": True, "window_size": (3, 0)}
    wanted = keys.clone(), values.clone()

    flash_attn_with_kvcache(query, keys, values, **given)

    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])


def test_what_wraps_on_a_device_is_beyond_every_cache(monkeypatch):
    """A device is not waited for: the number becomes one for which nothing is written, and whose length is the room."""
    monkeypatch.setattr(flash_cache.Tensor, "is_cpu", False)
    lengths = flash_cache.as_int32("cache_seqlens", torch.tensor([2**32 + 3, -(2**40), 5]))

    assert lengths.tolist() == [2**30, -(2**30), 5]
    slots = flash_cache.slots_of(lengths, 2, torch.tensor([[0], [1], [2]], dtype=torch.int32), (3, 16))
    assert slots.tolist() == [[-1, -1], [-1, -1], [37, 38]]
