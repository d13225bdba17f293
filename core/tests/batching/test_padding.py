from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import pad_batch, pad_block_table, pad_rows, padded_size
from attnplug.contract import PAD_SLOT_ID, Batch
from attnplug.errors import BatchError


@given(st.integers(0, 40), st.lists(st.integers(0, 40), unique=True))
def test_padded_size_is_the_smallest_that_holds(size: int, sizes: list[int]) -> None:
    assert padded_size(size, sizes) == next((s for s in sorted(sizes) if s >= size), None)


def test_pad_rows_keeps_the_rows_and_fills_the_new_ones() -> None:
    padded = pad_rows(torch.tensor([[1, 2], [3, 4]]), 4, -1)

    assert padded.tolist() == [[1, 2], [3, 4], [-1, -1], [-1, -1]]


def test_padding_never_drops_rows() -> None:
    with pytest.raises(BatchError, match="3 rows are to be padded to 2"):
        pad_rows(torch.zeros(3), 2, 0)


@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_a_padded_block_table_names_the_null_block(rows: int, columns: int, more_rows: int, more_columns: int) -> None:
    table = torch.randint(1, 99, (rows, columns), dtype=torch.int32)

    padded = pad_block_table(table, rows + more_rows, columns + more_columns)

    assert padded.dtype == torch.int32
    assert (
        padded.tolist()
        == [*(row + [0] * more_columns for row in table.tolist())] + [[0] * (columns + more_columns)] * more_rows
    )
    assert torch.equal(pad_block_table(table, rows + more_rows), padded[:, :columns])


def test_padding_never_drops_columns() -> None:
    with pytest.raises(BatchError, match="3 columns is to be padded to 2"):
        pad_block_table(torch.ones(1, 3), 1, 2)


def test_a_batch_is_padded_to_the_columns_of_a_graph() -> None:
    batch = Batch.from_lengths([1], [5], block_table=torch.ones(1, 2, dtype=torch.int32))

    padded = pad_batch(batch, 2, num_blocks=4)

    assert padded.block_table is not None
    assert padded.block_table.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert padded.block_table_cpu is not None
    assert torch.equal(padded.block_table_cpu, padded.block_table)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 5))
def test_a_padded_batch_has_empty_requests_at_its_end(query_lens: list[int], more_reqs: int, more_rows: int) -> None:
    tokens, reqs = sum(query_lens), len(query_lens)
    batch = Batch.from_lengths(
        query_lens, block_table=torch.ones(reqs, 1, dtype=torch.int32), slot_mapping=torch.arange(16, 16 + tokens)
    )

    padded = pad_batch(batch, reqs + more_reqs, tokens + more_rows)

    assert padded.num_reqs == reqs + more_reqs
    assert padded.num_actual_tokens == tokens
    assert padded.query_start_loc.diff().tolist() == query_lens + [0] * more_reqs
    assert padded.query_start_loc_cpu is not None
    assert padded.query_start_loc_cpu.tolist() == padded.query_start_loc.tolist()
    assert padded.seq_lens.tolist() == query_lens + [0] * more_reqs
    assert padded.block_table is not None
    assert padded.block_table[reqs:].tolist() == [[0]] * more_reqs
    assert padded.slot_mapping is not None
    assert padded.slot_mapping.tolist() == [*range(16, 16 + tokens), *[PAD_SLOT_ID] * more_rows]
    assert batch.num_reqs == reqs, "the original is not changed"


def test_dense_batches_are_padded_by_their_keys_too() -> None:
    padded = pad_batch(Batch.from_lengths([2], [3]), 2)

    assert padded.key_start_loc is not None
    assert padded.key_start_loc.tolist() == [0, 3, 3]
    assert padded.slot_mapping is None


def test_a_custom_mask_is_refused() -> None:
    batch = Batch.from_lengths([1], [2], custom_mask=torch.ones(2, dtype=torch.bool))

    with pytest.raises(BatchError, match="custom mask"):
        pad_batch(batch, 2)


def test_padding_is_added_to_the_padding_that_there_is() -> None:
    batch = Batch.from_lengths(
        [2, 1], [2, 5], block_table=torch.ones(2, 1, dtype=torch.int32), slot_mapping=torch.arange(16, 19)
    )
    padded = pad_batch(evolve(batch, num_padded_reqs=1), 4)

    assert (padded.num_reqs, padded.num_padded_reqs) == (4, 3)
    assert pad_batch(batch, 4).num_padded_reqs == 0
