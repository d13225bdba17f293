from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnplug.errors import TensorError
from attnplug.ops import write, write_pages

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, SIZE = 2, 3


def nhd(blocks: int, block_size: int) -> Tensor:
    return torch.randn(blocks, block_size, HEADS, SIZE)


def hnd(blocks: int, block_size: int) -> Tensor:
    return torch.randn(blocks, HEADS, block_size, SIZE).transpose(1, 2)


def layers_inside(blocks: int, block_size: int) -> Tensor:
    return torch.randn(blocks, 2, block_size, HEADS, SIZE)[:, 1]


def padded_pages(blocks: int, block_size: int) -> Tensor:
    return torch.randn(blocks, block_size + 1, HEADS, SIZE)[:, :block_size]


layouts = st.sampled_from([nhd, hnd, layers_inside, padded_pages])
# The first is what the CPU takes, the second what a device takes: both have to be right, and both run here.
writers = st.sampled_from([write._write_unpadded, write._write_padded])


@given(layouts, writers, st.sampled_from([1, 4]), st.integers(2, 4), st.data())
def test_exactly_the_given_slots_change(
    layout: Callable[[int, int], Tensor],
    writer: Callable[[Tensor, Tensor, Tensor], None],
    block_size: int,
    blocks: int,
    data: st.DataObject,
) -> None:
    pages = layout(blocks, block_size)
    free = st.integers(block_size, blocks * block_size - 1)
    slots = data.draw(st.lists(free, unique=True, max_size=6))
    for _ in range(data.draw(st.integers(0, 3))):
        slots.insert(data.draw(st.integers(0, len(slots))), -1)
    rows = torch.randn(len(slots), HEADS, SIZE)
    expected = pages.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            expected[slot // block_size, slot % block_size] = row

    writer(rows, pages, torch.tensor(slots, dtype=torch.int64))

    assert torch.equal(pages, expected)


@given(layouts, writers)
def test_a_null_block_of_nan_keeps_its_bits(
    layout: Callable[[int, int], Tensor], writer: Callable[[Tensor, Tensor, Tensor], None]
) -> None:
    pages = layout(2, 4).fill_(torch.nan)

    writer(torch.ones(3, HEADS, SIZE), pages, torch.tensor([-1, 5, -1]))

    assert pages[0].isnan().all()
    assert (~pages.isnan()).sum() == HEADS * SIZE
    assert pages[1, 1].eq(1).all()


def test_rows_beyond_the_slots_are_not_read_and_dtypes_are_converted() -> None:
    pages = torch.zeros(2, 4, HEADS, SIZE, dtype=torch.bfloat16)
    rows = torch.full((3, HEADS, SIZE), torch.nan)
    rows[0] = 1 / 3

    write_pages(rows, pages, torch.tensor([6]))

    assert pages.count_nonzero() == HEADS * SIZE
    assert torch.equal(pages[1, 2], rows[0].bfloat16())


@pytest.mark.parametrize(("rows", "slots"), [((2, HEADS, SIZE), 3), ((3, HEADS, SIZE + 1), 3), ((3, 1, SIZE), 3)])
def test_shapes_that_do_not_fit_leave_the_cache_alone(rows: tuple[int, ...], slots: int) -> None:
    pages = torch.zeros(2, 4, HEADS, SIZE)

    with pytest.raises(TensorError, match="3 slots were given"):
        write_pages(torch.ones(rows), pages, torch.arange(slots))

    assert not pages.any()


@given(layouts, st.permutations(range(4, 16)), st.integers(0, 12))
def test_slots_without_padding_need_no_look(layout: Callable[[int, int], Tensor], slots: list[int], count: int) -> None:
    pages, rows, mapping = layout(4, 4), torch.randn(13, HEADS, SIZE), torch.tensor(slots[:count], dtype=torch.int64)
    expected = pages.clone()
    write_pages(rows, expected, mapping)
    write_pages(rows, pages, mapping, padded=False)
    assert torch.equal(pages, expected)
