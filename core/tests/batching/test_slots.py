from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import slots_of_new_tokens
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
