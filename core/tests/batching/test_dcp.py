from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import max_local_tokens_per_dcp_rank, num_local_tokens_per_dcp_rank
from attnplug.errors import BatchError

groups = st.tuples(st.integers(1, 5), st.integers(1, 6))


def distribute(length: int, world_size: int, interleave: int) -> list[int]:
    """Distribute tokens one by one."""
    held = [0] * world_size
    for token in range(length):
        held[token // interleave % world_size] += 1
    return held


@given(st.lists(st.integers(0, 70), max_size=6), groups, st.sampled_from([torch.int32, torch.int64]))
def test_agrees_with_distributing_tokens_one_by_one(
    seq_lens: list[int], group: tuple[int, int], dtype: torch.dtype
) -> None:
    world_size, interleave = group
    lengths = torch.tensor(seq_lens, dtype=dtype)

    shares = [num_local_tokens_per_dcp_rank(lengths, world_size, rank, interleave) for rank in range(world_size)]

    assert {share.dtype for share in shares} == {dtype}
    assert torch.stack(shares, 1).tolist() == [distribute(length, world_size, interleave) for length in seq_lens]


@given(st.integers(0, 70), groups)
def test_the_bound_holds_and_is_reached_by_a_whole_round(longest: int, group: tuple[int, int]) -> None:
    world_size, interleave = group
    bound = max_local_tokens_per_dcp_rank(longest, world_size, interleave)

    assert max(max(distribute(length, world_size, interleave)) for length in range(longest + 1)) <= bound
    whole = -(-longest // (world_size * interleave)) * world_size * interleave
    assert distribute(whole, world_size, interleave) == [bound] * world_size


def test_the_shape_is_kept() -> None:
    assert num_local_tokens_per_dcp_rank(torch.zeros(2, 3, dtype=torch.int32), 2, 1).shape == (2, 3)


@pytest.mark.parametrize(
    ("group", "said"),
    [((0, 0, 1), "world_size=0"), ((2, 0, 0), "interleave=0"), ((2, 2, 1), "rank=2"), ((2, -1, 1), "rank=-1")],
)
def test_impossible_groups_are_refused(group: tuple[int, int, int], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        num_local_tokens_per_dcp_rank(torch.ones(1, dtype=torch.int32), *group)


@pytest.mark.parametrize(("arguments", "said"), [((-1, 1, 1), "max_seq_len=-1"), ((5, 0, 1), "world_size=0")])
def test_impossible_bounds_are_refused(arguments: tuple[int, int, int], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        max_local_tokens_per_dcp_rank(*arguments)
