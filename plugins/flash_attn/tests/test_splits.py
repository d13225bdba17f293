"""The number of split-KV parts: by the size of the step, the host's limit, and batch invariance."""

from __future__ import annotations

import pytest

from attnplug.contract import Limits
from attnplug_flash_attn.passes import num_splits


@pytest.mark.parametrize(
    ("captured", "bound", "tokens", "invariant", "expected"),
    [
        ((), None, 4, False, 0),
        ((), 16, 4, False, 0),  # without captures, the memory for splits needs no limit
        ((2, 8), 16, 8, False, 16),
        ((2, 8), 16, 9, False, 0),
        ((2, 8), None, 8, False, 0),
        ((2, 8), 16, 8, True, 1),
        ((), None, 4, True, 1),
        ((2, 8), 1, 3, False, 1),
        ((2, 8), 1, 9, False, 1),
        ((), 1, 4, False, 1),
    ],
)
def test_num_splits(captured, bound, tokens, invariant, expected) -> None:
    limits = Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=64, capture_sizes=captured, max_num_splits=bound)
    assert num_splits(limits, tokens, batch_invariant=invariant) == expected
