"""The merge of split-KV attention against a softmax over the splits: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.ops import merge_splits
from tests.backends.triton_on_cpu import DEVICE, MARKS

pytestmark = MARKS


@given(
    rows=st.integers(1, 4),
    padding=st.integers(0, 2),
    heads=st.sampled_from([1, 3]),
    size=st.sampled_from([64, 80, 192]),
    splits=st.sampled_from([1, 2, 7, 8, 9, 64, 65]),
    has_lse=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_weights_splits_by_their_lse(rows, padding, heads, size, splits, has_lse, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(rows + padding, heads, splits, size, generator=generator)
    part_lse = 3 * torch.randn(rows + padding, heads, splits, generator=generator)
    empty = torch.rand(rows + padding, heads, splits, generator=generator) < 0.3
    empty[0, 0] = True  # a row without keys
    part_lse[empty], parts[empty] = -torch.inf, torch.nan
    total = torch.logsumexp(part_lse * math.log(2), -1)
    weights = torch.exp(part_lse * math.log(2) - total[..., None]).nan_to_num(0.0)
    expected = (weights[..., None] * parts.nan_to_num(0.0)).sum(2)
    out = torch.full((rows + padding, heads, size), 7.0, device=DEVICE)
    lse = torch.full((rows + padding, heads), 7.0, device=DEVICE) if has_lse else None
    starts = torch.tensor([0, 1, rows], dtype=torch.int32, device=DEVICE)

    merge_splits(parts.to(DEVICE), part_lse.to(DEVICE), out, lse, starts)

    torch.testing.assert_close(out[:rows].cpu(), expected[:rows], rtol=1e-5, atol=1e-5)
    assert (out[rows:] == 7).all()
    if lse is not None:
        torch.testing.assert_close(lse[:rows].cpu(), total[:rows], rtol=1e-5, atol=1e-5)
        assert (lse[rows:] == 7).all()


def test_rows_of_requests_that_are_longer_are_not_written() -> None:
    parts, part_lse = torch.ones(3 * 2, 3, 2, 64, device=DEVICE), torch.zeros(3 * 2, 3, 2, device=DEVICE)
    out, lse = torch.full((7, 3, 64), 7.0, device=DEVICE), torch.full((7, 3), 7.0, device=DEVICE)
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=DEVICE)
    parts[1], part_lse[1] = torch.nan, torch.nan  # the second row of the first request, which has one

    merge_splits(parts, part_lse, out, lse, starts, query_len=2)

    assert [row.unique().tolist() for row in out] == [[1.0], [7.0], [7.0], [7.0], [1.0], [1.0], [7.0]]
    assert lse[:, 0].tolist() == pytest.approx([math.log(2), 7, 7, 7, math.log(2), math.log(2), 7])
