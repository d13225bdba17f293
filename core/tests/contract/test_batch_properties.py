"""Random batches: true ones pass and are split rightly, and one corrupted number is enough to be refused."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from attnplug.contract import Batch
from attnplug.errors import BatchError, CacheError, ContractError
from core.tests.contract.world import make_backend, make_builder

pytestmark = pytest.mark.unmeasured

NUM_BLOCKS = 64
MAX_TOKENS = 64


@st.composite
def batches(draw, stale=(0, -1, 10**9, 1)):
    """Return a block size and a true batch: requests and blocks in any order, stale entries in unused columns."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    decodes = draw(st.integers(0, 5))
    prefills = draw(st.lists(st.integers(2, 9), min_size=0 if decodes else 1, max_size=3))
    queries = draw(st.permutations([1] * decodes + prefills))
    lengths = [query + draw(st.integers(0, 12)) for query in queries]
    counts = [-(-length // block_size) for length in lengths]
    assume(sum(counts) < NUM_BLOCKS)
    blocks = iter(draw(st.permutations(range(1, NUM_BLOCKS))))
    width = max(counts) + draw(st.integers(0, 2))
    table = torch.full((len(queries), width), draw(st.sampled_from(stale)), dtype=torch.int32)
    for row, used in enumerate(counts):
        table[row, :used] = torch.tensor([next(blocks) for _ in range(used)], dtype=torch.int32)
    slots = [
        int(table[row, p // block_size]) * block_size + p % block_size
        for row, (query, length) in enumerate(zip(queries, lengths, strict=True))
        for p in range(length - query, length)
    ]
    padding = [-1] * draw(st.integers(0, 3))
    return block_size, Batch.from_lengths(
        queries, lengths, block_table=table, slot_mapping=torch.tensor(slots + padding, dtype=torch.int64)
    )


def build(block_size, batch, **requested):
    bounds = {"num_blocks": NUM_BLOCKS, "max_num_tokens": MAX_TOKENS}
    return make_builder(make_backend(block_size=block_size, **requested), **bounds).build(batch)


def used_entries(block_size, batch):
    return [
        (row, column)
        for row, length in enumerate(batch.seq_lens.tolist())
        for column in range(-(-length // block_size))
    ]


@given(batches())
def test_a_true_batch_passes_and_is_split(sized):
    block_size, batch = sized

    metadata = build(block_size, batch)

    lens = batch.query_start_loc.diff().tolist()
    assert metadata.num_decodes == next((row for row, length in enumerate(lens) if length > 1), len(lens))
    assert metadata.num_decode_tokens == metadata.num_decodes
    assert metadata.num_decodes + metadata.num_prefills == batch.num_reqs
    assert metadata.num_decode_tokens + metadata.num_prefill_tokens == batch.num_actual_tokens
    assert metadata.num_key_rows == len(batch.slot_mapping)
    highest = max(int(batch.block_table[entry]) for entry in used_entries(block_size, batch))
    assert highest <= metadata.highest_block < NUM_BLOCKS
    unbounded = make_builder(make_backend(block_size=block_size), num_blocks=None).build(batch)
    assert unbounded.highest_block == highest


@given(batches(), st.data())
def test_any_used_block_outside_the_cache_is_refused(sized, data):
    block_size, batch = sized
    entry = data.draw(st.sampled_from(used_entries(block_size, batch)))
    batch.block_table[entry] = data.draw(st.sampled_from([0, -1, NUM_BLOCKS, 2**31 - 1, -(2**31)]))

    assert refusal(block_size, batch) is CacheError


@given(batches(), st.data())
def test_any_slot_that_is_not_the_tokens_own_is_refused(sized, data):
    block_size, batch = sized
    token = data.draw(st.integers(0, batch.num_actual_tokens - 1))
    wrong = data.draw(st.integers(-3, (NUM_BLOCKS + 1) * block_size))
    assume(wrong not in (int(batch.slot_mapping[token]), -1))
    batch.slot_mapping[token] = wrong

    assert refusal(block_size, batch) is CacheError


@given(batches(), st.data())
def test_any_wrong_start_is_refused(sized, data):
    block_size, batch = sized
    index = data.draw(st.integers(0, batch.num_reqs))
    batch.query_start_loc[index] += data.draw(st.sampled_from([-3, -1, 1, 3]))

    assert issubclass(refusal(block_size, batch), ContractError)


@given(batches(), st.data())
def test_any_count_that_is_too_small_is_refused(sized, data):
    block_size, batch = sized
    name = data.draw(st.sampled_from(["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"]))
    wrong = getattr(batch, name) - data.draw(st.integers(1, 3))

    assert issubclass(refusal(block_size, evolve(batch, **{name: wrong})), ContractError)


@given(batches(), st.integers(1, 3))
def test_more_requests_than_there_are_is_refused(sized, more):
    block_size, batch = sized

    assert issubclass(refusal(block_size, evolve(batch, num_reqs=batch.num_reqs + more)), ContractError)


@given(batches(stale=(0, -1, 10**9)), st.data())
def test_any_length_that_grows_past_its_pages_is_refused(sized, data):
    """One key more or less moves the request's new tokens to other slots, so that the mapping contradicts it."""
    block_size, batch = sized
    row = data.draw(st.integers(0, batch.num_reqs - 1))
    batch.seq_lens[row] += data.draw(st.sampled_from([-1, 1]))

    assert refusal(block_size, evolve(batch, max_seq_len=int(batch.seq_lens.max()))) in (BatchError, CacheError)


@given(batches(), st.data())
def test_any_two_tokens_of_one_slot_are_refused(sized, data):
    block_size, batch = sized
    assume(batch.num_actual_tokens > 1)
    first, second = data.draw(
        st.lists(st.integers(0, batch.num_actual_tokens - 1), min_size=2, max_size=2, unique=True)
    )
    batch.slot_mapping[first] = int(batch.slot_mapping[second])

    assert refusal(block_size, batch) is CacheError


@given(batches(), st.integers(1, 20))
def test_blocks_before_the_window_are_free(sized, window):
    block_size, batch = sized
    contexts = (batch.seq_lens - batch.query_start_loc.diff()).tolist()
    for row, context in enumerate(contexts):
        batch.block_table[row, : max(0, context - (window - 1)) // block_size] = 0

    assert build(block_size, batch, sliding_window=window).num_decodes >= 0

    attended = max(0, contexts[0] - (window - 1)) // block_size
    batch.block_table[0, attended] = 0
    assert refusal(block_size, batch, sliding_window=window) is CacheError


def refusal(block_size, batch, **requested):
    """Return the kind of error that refuses the batch, whose sentences are all there."""
    with pytest.raises(ContractError) as caught:
        build(block_size, batch, **requested)
    assert all((caught.value.problem, caught.value.expected, caught.value.fix))
    return caught.type
