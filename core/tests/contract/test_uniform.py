"""Equal query lengths are found by one comparison, and agree with the differences of the starts."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attnplug.contract import Batch
from attnplug.contract.inputs.phase import _of_shape, packed_query_lens, uniform_query_lens


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_they_are_found_exactly_where_all_are_the_longest(lens):
    batch = Batch.from_lengths(lens)
    found = uniform_query_lens(batch)

    assert (found is not None) == (min(lens) == max(lens) > 0)
    if found is not None:
        assert torch.equal(found, batch.query_start_loc.diff())


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "num_reqs": st.integers(-1, 6),
            "num_actual_tokens": st.integers(-1, 15),
            "max_query_len": st.integers(-1, 4),
        },
    ),
)
def test_numbers_that_contradict_the_starts_find_none(lens, numbers):
    batch = evolve(Batch.from_lengths(lens), **numbers)
    found = uniform_query_lens(batch)

    if found is not None:
        assert found.tolist() == lens
        assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len) == (len(lens), sum(lens), max(lens))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 4), st.integers(0, 3))
def test_padding_at_the_end_is_no_query(lens, bound, spare):
    batch = evolve(Batch.from_lengths(lens), max_query_len=bound, num_actual_tokens=sum(lens) + spare)
    found = packed_query_lens(batch, batch.query_start_loc_cpu)

    running = [length for length in lens if length]
    comes_last = lens == running + [0] * (len(lens) - len(running))
    assert (found is not None) == (comes_last and bool(running) and set(running) == {bound})
    if found is not None:
        assert (found[0], found[1].tolist()) == (sum(lens), lens)


@pytest.mark.parametrize(
    "starts", [[0, 1, 2, 2, 1], [0, 1, 1, 2, 2], [1, 2, 3, 3, 3], [0, 2, 1, 2, 2], [0, 1, 2, 3, 2]]
)
def test_starts_that_are_wrong_before_the_last_are_no_padding(starts):
    batch = evolve(Batch.from_lengths([1, 1, 0, 0]), query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32))
    assert packed_query_lens(batch, batch.query_start_loc_cpu) is None


def test_a_host_copy_that_is_missing_or_of_another_form_finds_none():
    batch = Batch.from_lengths([1, 1])
    starts = batch.query_start_loc

    assert uniform_query_lens(batch) is not None
    for host in (None, starts.long(), starts.float(), starts[:2], starts.unsqueeze(0), starts.to("meta")):
        assert uniform_query_lens(evolve(batch, query_start_loc_cpu=host)) is None


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len"])
@pytest.mark.parametrize("value", [None, "2", 2.0, torch.tensor(2), torch.tensor(2, device="meta"), torch.ones(2)])
def test_what_is_no_python_int_finds_none(name, value):
    """It has not been checked where a host asks whether a graph fits."""
    assert uniform_query_lens(evolve(Batch.from_lengths([1, 1]), **{name: value})) is None


@pytest.mark.parametrize("seen_before", [True, False])
def test_a_mode_that_fakes_tensors_leaves_none_behind(seen_before):
    _of_shape.cache_clear()
    batch = Batch.from_lengths([11] * 3)
    if seen_before:
        assert uniform_query_lens(batch) is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert uniform_query_lens(batch) is None

    assert uniform_query_lens(batch) is not None


def test_a_default_device_is_no_device_of_host_copies():
    batch = Batch.from_lengths([13] * 3)
    with torch.device("meta"):
        found = uniform_query_lens(batch)

    assert found is not None
    assert found.is_cpu
