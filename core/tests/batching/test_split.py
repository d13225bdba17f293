from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import Split, split_decodes_and_prefills
from attnplug.contract import Batch
from attnplug.errors import BatchError


@st.composite
def ordered(draw: st.DrawFn) -> tuple[list[int], int]:
    threshold = draw(st.integers(1, 4))
    decodes = draw(st.lists(st.integers(1, threshold), max_size=5))
    prefills = draw(st.lists(st.integers(threshold + 1, 30), max_size=4))
    return decodes + prefills + [0] * draw(st.integers(0, 2)), threshold


@given(ordered())
def test_counts_requests_and_tokens_on_both_sides(drawn: tuple[list[int], int]) -> None:
    lens, threshold = drawn
    decodes = [n for n in lens if 0 < n <= threshold]
    prefills = [n for n in lens if n > threshold]
    padding = lens.count(0)

    split = split_decodes_and_prefills(Batch.from_lengths(lens), threshold)

    assert split.num_decodes == len(decodes) + (0 if prefills else padding)
    assert split.num_prefills == len(prefills) + (padding if prefills else 0)
    assert (split.num_decode_tokens, split.num_prefill_tokens) == (sum(decodes), sum(prefills))


@given(ordered())
def test_uniform_decodes_all_have_one_length(drawn: tuple[list[int], int]) -> None:
    lens, threshold = drawn

    split = split_decodes_and_prefills(Batch.from_lengths(lens), threshold, require_uniform=True)

    front = {n for n in lens[: split.num_decodes] if n}
    assert len(front) <= 1
    assert split.num_decode_tokens == sum(lens[: split.num_decodes])
    if split.num_prefills:
        assert lens[split.num_decodes] > threshold or lens[split.num_decodes] != lens[0]


def test_a_decode_behind_a_prefill_is_refused_with_the_way_out() -> None:
    with pytest.raises(BatchError, match=r"request 2 has 1 query tokens[\s\S]*reorder_batch_to_split"):
        split_decodes_and_prefills(Batch.from_lengths([1, 5, 1]))


def test_only_the_host_copy_is_read() -> None:
    batch = evolve(Batch.from_lengths([1, 5]), query_start_loc=torch.zeros(3, dtype=torch.int32, device="meta"))

    assert split_decodes_and_prefills(batch) == Split(1, 1, 1, 5)


def test_without_a_host_copy_nothing_is_guessed() -> None:
    batch = evolve(Batch.from_lengths([1, 5]), query_start_loc_cpu=None)

    with pytest.raises(BatchError, match="no query_start_loc_cpu"):
        split_decodes_and_prefills(batch)


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(BatchError, match="decode_threshold=0"):
        split_decodes_and_prefills(Batch.from_lengths([1]), 0)
