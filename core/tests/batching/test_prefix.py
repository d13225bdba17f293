from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import BatchAssembler, pad_batch, shared_prefix_blocks, shared_prefix_len
from attnplug.contract import Batch
from attnplug.errors import BatchError


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(0, 2),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 1),
)
def test_agrees_with_comparing_token_by_token(
    requests: list[tuple[int, int, int]], padding: int, block_size: int, freed: int
) -> None:
    """Each request shares some blocks with the others; with `freed` their first block is the null block."""
    lens = [(query, computed) for query, computed, _ in requests]
    columns = max(-(-(query + computed) // block_size) for query, computed in lens)
    table = [
        [0 if column < freed else 1 + column + (0 if column < shared else 100 * row) for column in range(columns)]
        for row, (_, _, shared) in enumerate(requests, 1)
    ]
    batch = Batch.from_lengths(
        [query for query, _ in lens],
        [query + computed for query, computed in lens],
        block_table=torch.tensor(table, dtype=torch.int32),
    )

    expected = 0
    least = min(computed for _, computed in lens)
    while len(lens) > 1 and expected + block_size <= least and table[0][expected // block_size]:
        if len({row[expected // block_size] for row in table}) > 1:
            break
        expected += block_size

    assert shared_prefix_len(pad_batch(batch, len(lens) + padding), block_size) == expected


def test_the_batch_of_an_assembler_has_the_tensors() -> None:
    assembler = BatchAssembler(4)
    assembler.add(1, 9, [5, 6, 7])
    assembler.add(1, 10, [5, 6, 8])

    assert shared_prefix_len(assembler.finish(num_reqs=3), 4) == 8


def test_a_missing_cpu_copy_is_refused() -> None:
    batch = Batch.from_lengths([1], [1], block_table=torch.ones(1, 1, dtype=torch.int32))

    with pytest.raises(BatchError, match="without block_table_cpu"):
        shared_prefix_len(evolve(batch, block_table_cpu=None), 4)


def test_the_blocks_are_those_of_the_first_request_that_runs():
    table = torch.tensor([[0, 0, 0], [0, 0, 0], [4, 5, 6], [4, 5, 7]], dtype=torch.int32)
    batch = Batch.from_lengths([0, 0, 1, 1], [0, 0, 9, 10], block_table=table)
    assert shared_prefix_blocks(evolve(batch, common_prefix_len=8), 4).tolist() == [[4, 5]]
    running = Batch.from_lengths([1, 1], [9, 10], block_table=table[2:])
    assert shared_prefix_blocks(evolve(running, common_prefix_len=4), 4).tolist() == [[4]]


@pytest.mark.parametrize("missing", ["block_table", "query_start_loc_cpu"])
def test_blocks_require_the_table_and_query_starts(missing):
    batch = Batch.from_lengths([1, 1], [9, 10], block_table=torch.ones(2, 3, dtype=torch.int32))
    with pytest.raises(BatchError, match=missing):
        shared_prefix_blocks(evolve(batch, **{missing: None}), 4)
