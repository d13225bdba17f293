"""The rounding to FP8, compared with the distances to all numbers of the dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug_kit.oracle import nearest

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def numbers_of(dtype):
    """Return finite numbers, those with even codes first."""
    numbers = torch.cat([CODES[::2], CODES[1::2]]).view(dtype).double()
    return numbers[numbers.isfinite()]


def by_distance(values, dtype):
    numbers = numbers_of(dtype)
    return numbers[(values.unsqueeze(1) - numbers).abs().argmin(1)]


@given(
    dtype=st.sampled_from(DTYPES),
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)),
)
def test_no_number_is_nearer(dtype, values):
    values = torch.tensor(values, dtype=torch.float64)

    assert torch.equal(nearest(values, dtype), by_distance(values, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_keep_their_value_and_ties_go_to_even_codes(dtype):
    numbers = numbers_of(dtype).unique()
    between = (numbers[1:] + numbers[:-1]) / 2

    assert torch.equal(nearest(numbers, dtype), numbers)
    assert torch.equal(nearest(between, dtype), by_distance(between, dtype))
    assert (nearest(between, dtype).to(dtype).view(torch.uint8) % 2 == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_beyond_the_largest_become_the_largest(dtype):
    largest = torch.finfo(dtype).max
    found = nearest(torch.tensor([[torch.inf, 2e300], [-torch.inf, torch.nan]], dtype=torch.float64), dtype)

    assert found[0].tolist() == [largest, largest]
    assert found[1, 0] == -largest
    assert found[1, 1].isnan()
