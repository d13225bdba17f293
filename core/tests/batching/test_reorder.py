from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import reorder_batch_to_split_decodes_and_prefills as reorder
from attnplug.errors import BatchError

scheduled = st.lists(st.integers(0, 4), max_size=6)


@given(scheduled, st.integers(1, 3))
def test_decodes_come_first_and_nobody_is_lost(tokens: list[int], threshold: int) -> None:
    names = [f"request-{i}" for i in range(len(tokens))]
    by_name = dict(zip(names, tokens, strict=True))

    result = reorder(names, by_name, threshold)

    kinds = [by_name[name] > threshold for name in result.order]
    assert kinds == sorted(kinds)
    assert sorted(result.order) == sorted(names)
    assert result.changed == (list(result.order) != names)


@given(scheduled)
def test_swaps_permute_a_hosts_state_the_same_way(tokens: list[int]) -> None:
    names = list(range(len(tokens)))
    state = [f"state-{name}" for name in names]

    result = reorder(names, dict(enumerate(tokens)))
    result.apply(state)

    assert state == [f"state-{name}" for name in result.order]


@given(scheduled, st.integers(1, 3))
def test_no_fewer_swaps_would_do(tokens: list[int], threshold: int) -> None:
    result = reorder(range(len(tokens)), dict(enumerate(tokens)), threshold)

    assert len(result.swaps) == _least_swaps(tuple(n > threshold for n in tokens))


def _least_swaps(kinds: tuple[bool, ...]) -> int:
    """Breadth first over every exchange of two positions."""
    goal = tuple(sorted(kinds))
    distance, queue = {kinds: 0}, deque([kinds])
    while goal not in distance:
        here = queue.popleft()
        for i in range(len(here)):
            for j in range(i):
                there = list(here)
                there[i], there[j] = there[j], there[i]
                if tuple(there) not in distance:
                    distance[tuple(there)] = distance[here] + 1
                    queue.append(tuple(there))
    return distance[goal]


def test_requests_without_scheduled_tokens_are_named() -> None:
    with pytest.raises(BatchError, match="'b'"):
        reorder(["a", "b"], {"a": 1})
