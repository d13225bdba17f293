"""`varlen_attn` with a block table: a paged KV cache of two tensors that the caller owns and has written."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnplug
import attnplug_torch
from attnplug.errors import AttnplugError, CacheError, NoBackendError, NotNegotiatedError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_kit.oracle import attend
from hosts.torch.tests.reference import counted, served, varlen_attn

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")

BLOCKS = torch.tensor([[3, 5], [7, 2], [4, 8]], dtype=torch.int32)
STARTS, USED = torch.tensor([0, 5, 6, 13], dtype=torch.int32), torch.tensor([9, 31, 20], dtype=torch.int32)


@pytest.fixture
def runs(active, monkeypatch):
    """Return the implementations that run."""
    runs, run = [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *arguments: (runs.append(self), run(self, *arguments))[1])
    return runs


def pages(kv_heads=4, dtype=torch.float32):
    """Return a query of three sequences, and a KV cache whose rows beyond them are not numbers."""
    query = torch.randn(13, 4, 64, dtype=dtype)
    pools = [torch.randn(9, 16, kv_heads, 64, dtype=dtype) for _ in range(2)]
    used = torch.zeros(9, 16, dtype=torch.bool)
    for row, length in zip(BLOCKS.tolist(), USED.tolist(), strict=True):
        for position in range(length):
            used[row[position // 16], position % 16] = True
    for pool in pools:
        pool[~used] = torch.nan
    return query, *pools


def by_oracle(query, keys, values, starts=STARTS, used=USED, blocks=BLOCKS, **features):
    """Return the oracle's results of the sequences, one after another, as output and LSE."""
    results = []
    for row, length, (first, last) in zip(blocks.tolist(), used.tolist(), pairwise(starts.tolist()), strict=True):
        key, value = (pool[row].flatten(0, 1)[:length].double() for pool in (keys, values))
        features = {"scale": query.shape[-1] ** -0.5, **features}
        results.append(attend(query[first:last].double(), key, value, **features))
    return torch.cat([one.output for one in results]), torch.cat([one.lse for one in results])


def call(query, keys, values, **arguments):
    arguments = {"seqused_k": USED, "block_table": BLOCKS, "window_size": (-1, 0), "enable_gqa": True, **arguments}
    return varlen_attn(query, keys, values, STARTS, None, 7, 31, **arguments)


CALLS = {
    "causal": ({}, {}, {"causal": True}),
    "not causal": ({}, {"window_size": (-1, -1)}, {"causal": False}),
    "window": ({}, {"window_size": (6, 0)}, {"causal": True, "window": (6, 0)}),
    "scale": ({}, {"scale": 0.3}, {"causal": True, "scale": 0.3}),
    "grouped heads": ({"kv_heads": 2}, {}, {"causal": True}),
    "one split": ({}, {"num_splits": 1}, {"causal": True}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}, {"causal": True}),
}


@pytest.mark.parametrize(("shapes", "arguments", "features"), CALLS.values(), ids=CALLS)
def test_pages_are_read_in_place(shapes, arguments, features, active) -> None:
    query, keys, values = pages(**shapes)
    before = keys.clone(), values.clone()

    output, lse = call(query, keys, values, return_aux=varlen.AuxRequest(lse=True), **arguments)

    expected, expected_lse = by_oracle(query, keys, values, **features)
    tolerance = 2e-2 if query.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    tolerance = 1e-3 if query.dtype == torch.bfloat16 else 1e-5  # absolute too: the logarithm of a sum near 1 is near 0
    torch.testing.assert_close(lse.T.double(), expected_lse, rtol=tolerance, atol=tolerance)
    assert counted() == {("torch/sdpa", ""): 1}
    for pool, former in zip((keys, values), before, strict=True):
        torch.testing.assert_close(pool, former, rtol=0, atol=0, equal_nan=True)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 30)), min_size=1, max_size=4),
    st.integers(1, 2), st.integers(1, 3), st.sampled_from((16, 32)), st.integers(0, 99),
)  # fmt: skip
def test_every_batch_has_the_result_of_the_oracle(lengths, kv_heads, ratio, block_size, seed) -> None:
    used = torch.tensor([queries + before for queries, before in lengths], dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor([queries for queries, _ in lengths]).cumsum(0)], dtype=torch.int32)
    width = -(-int(used.max()) // block_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = torch.randperm(len(lengths) * width).view(len(lengths), width).to(torch.int32)
        query = torch.randn(int(starts[-1]), kv_heads * ratio, 32)
        keys, values = (torch.randn(len(lengths) * width + 1, block_size, kv_heads, 32) for _ in range(2))
    attnplug_torch.register()
    torch.nn.attention.activate_flash_attention_impl("attnplug")
    try:
        output, lse = varlen_attn(
            query, keys, values, starts, None, int(starts.diff().max()), int(used.max()), window_size=(-1, 0),
            seqused_k=used, block_table=blocks, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True),
        )  # fmt: skip
    finally:
        torch.nn.attention.restore_flash_attention_impl()

    expected, expected_lse = by_oracle(query, keys, values, starts, used, blocks, causal=True)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.T.double(), expected_lse, rtol=2e-5, atol=2e-5)


def test_pages_are_read_with_no_lengths_on_the_cpu(runs) -> None:
    call(*pages())

    agreement = runs[0].backend.agreement
    requested = agreement.requirements
    assert (requested.seq_lens_cpu_kind, requested.query_lens_cpu_kind) == ("absent", "absent")
    assert agreement.reads_lengths
    assert (agreement.kv_cache_form, agreement.kv_layout, requested.kv_in_cache) == ("split", "NHD", True)


def test_pages_between_those_of_other_layers_are_read(active) -> None:
    query, *pools = pages()
    pool = torch.full((9, 3, 2, 16, 4, 64), torch.nan)
    pool[:, 1, 0], pool[:, 1, 1] = pools

    output = call(query, *pool[:, 1].unbind(1))

    torch.testing.assert_close(output, call(query, *pools), rtol=0, atol=0)
    assert not output.isnan().any()


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_limit_of_splits_reaches_the_builder(is_paged, active, monkeypatch) -> None:
    limits, run = [], TorchImpl.run
    monkeypatch.setattr(
        TorchImpl, "run", lambda self, *given: (limits.append(given[4].state.limits), run(self, *given))[1]
    )
    query, *pools = pages()

    for splits in (3, 1):
        if is_paged:
            call(query, *pools, num_splits=splits)
        else:
            varlen_attn(query, query, query, STARTS, STARTS, 7, 7, num_splits=splits)

    assert [one.max_num_splits for one in limits] == [3, 1]


def test_pools_may_have_separate_strides(runs) -> None:
    query, keys, values = pages()
    spaced = torch.full((9, 2, 16, 4, 64), torch.nan)
    spaced[:, 1] = keys

    output = call(query, spaced[:, 1], values)

    torch.testing.assert_close(output, call(query, keys, values), rtol=0, atol=0)
    assert [one.backend.agreement.kv_cache_form for one in runs] == ["independent", "split"]


def test_the_output_may_be_given(active) -> None:
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    query, *pools = pages()
    out = torch.full_like(query, torch.nan)

    varlen.varlen_attn_out(out, query, *pools, STARTS, None, 7, 31, seqused_k=USED, block_table=BLOCKS)

    torch.testing.assert_close(out, call(query, *pools, window_size=(-1, -1)), rtol=0, atol=0)


def test_a_backend_that_is_named_serves_or_the_call_is_an_error(runs) -> None:
    given = pages()

    call(*given)
    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        call(*given)
    with attnplug.using(backend="torch"):
        call(*given)

    assert len(runs) == 2


def test_a_window_with_two_sides_is_no_window_over_pages(runs) -> None:
    """A request with a KV cache has no keys to the right of its window."""
    with pytest.raises(NotNegotiatedError, match=r"window_size=\(6, 6\) with a block_table"):
        call(*pages(), window_size=(6, 6))

    assert not runs


def test_layers_of_one_request_share_an_implementation(runs) -> None:
    for _ in range(3):
        call(*pages())

    assert len(runs) == 3
    assert len({id(one) for one in runs}) == 1


def test_a_sequence_may_be_in_block_0(active) -> None:
    """The pools of torch have no null block; where nothing is written, block 0 is a block like others."""
    query, *pools = pages()
    moved = [pool.roll(-2, 0) for pool in pools]

    output = call(query, *moved, block_table=BLOCKS - 2)

    assert int((BLOCKS - 2).min()) == 0
    torch.testing.assert_close(output, call(query, *pools), rtol=0, atol=0)


WRONG = {
    "queries of no sequence": ({"cu_seq_q": STARTS - torch.tensor([0, 0, 0, 1], dtype=torch.int32)}, "cu_seq_q"),
    "longest sequence": ({"max_k": 5}, "max_seq_len=5"),
    "longest query": ({"max_q": 1}, "max_query_len=1"),
    "more keys than blocks": ({"seqused_k": USED + 20, "max_k": 51}, "block_table"),
    "a negative number of keys": ({"seqused_k": USED - 10}, "-1 tokens"),
    "too few lengths": ({"seqused_k": USED[:2]}, r"it is \(3,\) int32"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_lengths_that_do_not_fit_are_refused(changes, words, runs) -> None:
    query, *pools = pages()
    given = {"cu_seq_q": STARTS, "max_q": 7, "max_k": 31, "seqused_k": USED, "block_table": BLOCKS, **changes}

    with pytest.raises(AttnplugError, match=words):
        varlen_attn(query, *pools, cu_seq_k=None, window_size=(-1, 0), **given)

    assert not runs


def test_blocks_beyond_the_pool_are_refused(runs) -> None:
    for block_table, message in ((BLOCKS - 3, "block -1"), (BLOCKS + 1, "a cache of 9 blocks")):
        with pytest.raises(CacheError, match=message):
            call(*pages(), block_table=block_table)

    assert not runs
    assert served() == 0
