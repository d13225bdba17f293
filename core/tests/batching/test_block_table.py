"""Rows that are kept between steps have the blocks that were given last."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching.block_table import BlockTable
from attnplug.errors import BatchError


@given(st.integers(0, 10**6), st.sampled_from([3, 40]))
def test_hosts_may_change_their_lists_between_steps(seed, most):
    generator, rows = random.Random(seed), BlockTable(4)
    lists = [[generator.randrange(1, 99) for _ in range(generator.randint(0, most))] for _ in range(most)]
    kept = []
    for _ in range(6):
        for blocks in generator.sample(lists, generator.randint(0, len(lists))):
            match generator.randrange(5):
                case 0:
                    blocks.append(generator.randrange(1, 99))
                case 1:
                    del blocks[generator.randint(0, len(blocks)) :]
                case 2:
                    blocks[: len(blocks) // 2] = [generator.choice([0, None])] * (len(blocks) // 2)
                case 3:
                    generator.shuffle(blocks)
                case 4:
                    blocks.extend(range(1, generator.randint(1, most)))
        generator.shuffle(lists)
        count = generator.randint(1, len(lists))
        for row, blocks in enumerate(lists[:count]):
            plain = [block or 0 for block in blocks]
            last = max((column + 1 for column, block in enumerate(plain) if block), default=0)
            holes = max((column + 1 for column, block in enumerate(plain[:last]) if not block), default=0)
            assert rows.set_row(row, blocks) == (last, holes)
            assert rows.has_freed(row, 0, last) == (0 in plain[:last])
        kept.append((rows.to_tensor(count), [[block or 0 for block in blocks] for blocks in lists[:count]]))
    for table, expected in kept:
        width = table.shape[1]
        assert table.dtype == torch.int32
        assert table.tolist() == [(blocks + [0] * width)[:width] for blocks in expected]
        assert not any(any(blocks[width:]) for blocks in expected)


def test_a_refused_row_is_not_changed():
    rows = BlockTable(4)
    rows.set_row(0, [1, 2])

    with pytest.raises(BatchError, match="the block -1"):
        rows.set_row(0, [3, -1])

    assert rows.to_tensor(1).tolist() == [[1, 2]]


def test_a_refused_row_takes_no_other_row():
    rows, blocks = BlockTable(4), [3, 4]
    rows.set_row(0, [1, 2])
    rows.set_row(1, blocks)
    blocks[1] = -4

    with pytest.raises(BatchError, match="the block -4"):
        rows.set_row(0, blocks)

    assert rows.to_tensor(2).tolist() == [[1, 2], [3, 4]]


def test_a_tuple_is_accepted():
    rows = BlockTable(4)

    assert rows.set_row(0, (4, None, 5)) == rows.set_row(0, [4, None, 5]) == (3, 2)
