"""Slots and positions of new tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import pad_batch, positions_of, positions_of_new_tokens, slots_of_new_tokens
from attnplug.contract import Batch
from attnplug.errors import BatchError

lengths = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=5)


@given(lengths, st.sampled_from([1, 2, 4, 16]), st.integers(0, 4), st.integers(0, 1000))
def test_agrees_with_a_loop_over_tokens(lens: list[tuple[int, int]], block_size: int, padding: int, seed: int) -> None:
    generator = random.Random(seed)
    columns = max(-(-(query + context) // block_size) for query, context in lens)
    table = [[generator.randrange(1, 500) for _ in range(columns)] for _ in lens]
    expected = [
        table[request][position // block_size] * block_size + position % block_size
        for request, (query, context) in enumerate(lens)
        for position in range(context, context + query)
    ]
    starts = torch.tensor([0, *(query for query, _ in lens)]).cumsum(0)

    slots = slots_of_new_tokens(
        torch.tensor(table, dtype=torch.int32).view(len(lens), columns),
        starts.int(),
        torch.tensor([context for _, context in lens], dtype=torch.int32),
        block_size,
        num_tokens=len(expected),
        num_padded_tokens=len(expected) + padding,
    )

    assert slots.dtype == torch.int64
    assert slots.tolist() == expected + [-1] * padding


def test_a_block_table_that_is_too_short_is_refused() -> None:
    starts, computed = torch.tensor([0, 5]), torch.tensor([0])

    with pytest.raises(BatchError, match="1 columns of 4 slots"):
        slots_of_new_tokens(torch.ones(1, 1, dtype=torch.int32), starts, computed, 4, num_tokens=5)


def test_fewer_padded_tokens_than_tokens_are_refused() -> None:
    starts, computed = torch.tensor([0, 5]), torch.tensor([0])

    with pytest.raises(BatchError, match="num_padded_tokens=4"):
        slots_of_new_tokens(torch.ones(1, 2, dtype=torch.int32), starts, computed, 4, num_tokens=5, num_padded_tokens=4)


tokens_of_requests = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=5)


@given(tokens_of_requests, st.integers(0, 4))
def test_counts_the_tokens_of_each_request_from_its_cached_ones(lens: list[tuple[int, int]], padding: int) -> None:
    queries, computed = [query for query, _ in lens], [cached for _, cached in lens]
    expected = [position for query, cached in lens for position in range(cached, cached + query)]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()
    tokens = sum(queries)

    found = positions_of_new_tokens(
        starts, torch.tensor(computed, dtype=torch.int32), num_tokens=tokens, num_padded_tokens=tokens + padding
    )

    assert found.dtype == torch.int64
    assert found.tolist() == expected + [0] * padding
    batch = Batch.from_lengths(queries, [query + cached for query, cached in lens])
    assert positions_of(batch).tolist() == expected
    assert positions_of(batch) is positions_of(batch)


def test_padded_rows_of_a_batch_have_position_0() -> None:
    batch = Batch.from_lengths(
        [1, 2], [5, 2], block_table=torch.ones(2, 2, dtype=torch.int32), slot_mapping=torch.arange(16, 19)
    )

    assert positions_of(pad_batch(batch, 4, 5)).tolist() == [4, 0, 1, 0, 0]


def test_fewer_padded_positions_than_tokens_are_refused() -> None:
    with pytest.raises(BatchError, match="num_padded_tokens=4"):
        positions_of_new_tokens(torch.tensor([0, 5]), torch.tensor([0]), num_tokens=5, num_padded_tokens=4)
