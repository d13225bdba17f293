"""The query lengths of an exact batch agree with the differences of its starts, however they are found."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from attnplug.contract import Batch
from attnplug.contract.inputs.exact import AS_GIVEN, _packed, exact_batch

LENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


def lengths_of(batch):
    return exact_batch(batch, AS_GIVEN)[1]


@given(LENS, st.integers(0, 4), st.integers(0, 3))
def test_one_length_is_found_whatever_the_bounds(lens, more, spare):
    batch = evolve(Batch.from_lengths(lens), max_query_len=max(lens) + more, num_actual_tokens=sum(lens) + spare)
    exact, lengths = exact_batch(batch, AS_GIVEN)

    running = [length for length in lens if length]
    assert lengths.query_len == (max(lens) if len({*running}) < 2 else None)
    assert (lengths.query_lens is not None) == bool(running)
    if running:
        assert lengths.is_packed == (len({*running}) == 1 and all(lens[: len(running)]))
        assert lengths.query_lens.tolist() == lens
        assert (exact.num_actual_tokens, exact.max_query_len) == (sum(lens), max(lens))


@given(
    LENS,
    st.fixed_dictionaries(
        {},
        optional={
            "num_reqs": st.integers(-1, 6),
            "num_actual_tokens": st.integers(-1, 15),
            "max_query_len": st.integers(-1, 4),
        },
    ),
)
def test_numbers_that_contradict_the_starts_leave_it_as_it_is(lens, numbers):
    batch = evolve(Batch.from_lengths(lens), **numbers)
    exact, lengths = exact_batch(batch, AS_GIVEN)

    holds = batch.num_reqs == len(lens) and 0 < sum(lens) <= batch.num_actual_tokens
    holds = holds and max(lens) <= batch.max_query_len
    assert (lengths.query_lens is not None) == holds
    assert holds or exact is batch


@pytest.mark.parametrize(
    "starts", [[0, 1, 2, 2, 1], [0, 2, 1, 2, 2], [0, 1, 2, 3, 2], [1, 2, 3, 3, 3], [-1, 0, 1, 1, 1], [0, 1, 1, 2, 3]]
)
def test_starts_that_are_out_of_order_are_not_lengths(starts):
    batch = evolve(Batch.from_lengths([1, 1, 0, 0]), query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32))
    assert lengths_of(batch).query_lens is None


def test_a_host_copy_that_is_missing_or_of_another_form_is_not_read():
    batch = Batch.from_lengths([1, 1])
    starts = batch.query_start_loc

    assert lengths_of(batch).query_lens is not None
    for host in (None, starts.long(), starts.float(), starts[:2], starts[:0], starts.unsqueeze(0), starts.to("meta")):
        assert lengths_of(evolve(batch, query_start_loc_cpu=host)).query_lens is None


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len"])
@pytest.mark.parametrize("value", [None, "2", 2.0, torch.tensor(2), torch.tensor(2, device="meta"), torch.ones(2)])
def test_what_is_no_python_int_is_no_count(name, value):
    """It has not been checked where a host asks whether a graph fits."""
    exact, lengths = exact_batch(batch := evolve(Batch.from_lengths([1, 1]), **{name: value}), AS_GIVEN)

    assert exact is batch
    assert (lengths.query_lens, lengths.query_len) == (None, 1)


@pytest.mark.parametrize("seen_before", [True, False])
def test_a_mode_that_fakes_tensors_leaves_none_behind(seen_before):
    _packed.cache_clear()
    batch = Batch.from_lengths([11] * 3)
    if seen_before:
        assert lengths_of(batch).query_len == 11
    with FakeTensorMode(allow_non_fake_inputs=True), suppress(DataDependentOutputException):  # no value is known there
        lengths_of(evolve(batch))

    found = lengths_of(evolve(batch))
    assert found.query_lens.tolist() == [11] * 3
    assert type(found.query_lens) is torch.Tensor


def test_a_default_device_is_no_device_of_host_copies():
    batch = Batch.from_lengths([13] * 3)
    with torch.device("meta"):
        found = lengths_of(batch).query_lens

    assert found is not None
    assert found.is_cpu
