from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnplug.ops import gather_blocks, gather_dense, gather_packed, gather_slots
from attnplug.ops.gather import slots_view
from core.tests.ops.test_write import HEADS, SIZE, hnd, nhd

if TYPE_CHECKING:
    from collections.abc import Callable


def layers_inside(blocks: int, block_size: int) -> Tensor:
    return torch.randn(2, blocks, 3, block_size, HEADS, SIZE)[1, :, 2]


layouts = st.sampled_from([nhd, hnd, layers_inside])


@given(layouts, st.integers(1, 4), st.sampled_from([1, 2, 5]), st.booleans())
def test_slots_are_read_in_the_given_order(
    layout: Callable[[int, int], Tensor], blocks: int, block_size: int, buffered: bool
) -> None:
    pages = layout(blocks, block_size)
    slots = torch.randint(0, blocks * block_size, (7,))
    out = torch.empty(7, HEADS, SIZE) if buffered else None

    rows = gather_slots(pages, slots, out=out)

    assert torch.equal(rows, torch.stack([pages[slot // block_size, slot % block_size] for slot in slots.tolist()]))
    assert out is None or rows is out


@given(layouts, st.integers(1, 4), st.sampled_from([1, 2, 5]))
def test_a_flat_view_shares_memory_and_never_misplaces_a_slot(
    layout: Callable[[int, int], Tensor], blocks: int, block_size: int
) -> None:
    pages = layout(blocks, block_size)

    flat = slots_view(pages)

    if flat is not None:
        assert flat.data_ptr() == pages.data_ptr()
        assert torch.equal(flat, pages.reshape(blocks * block_size, HEADS, SIZE))
    if layout is nhd:
        assert flat is not None


@given(layouts, st.lists(st.integers(0, 11), min_size=1, max_size=4), st.sampled_from([1, 4]))
def test_gathers_each_requests_rows(layout: Callable[[int, int], Tensor], seq_lens: list[int], block_size: int) -> None:
    columns = max(1, *(-(-n // block_size) for n in seq_lens))
    pages = layout(1 + columns * len(seq_lens), block_size)
    pages[0] = torch.nan
    table = (1 + torch.randperm(columns * len(seq_lens))).view(len(seq_lens), columns).int()
    rows = [
        [pages[table[r, p // block_size], p % block_size] for p in range(length)] for r, length in enumerate(seq_lens)
    ]
    lens = torch.tensor(seq_lens)

    dense = gather_dense(pages, table, lens, max(seq_lens))
    packed = gather_packed(pages, table, torch.tensor([0, *seq_lens]).cumsum(0), sum(seq_lens))

    for request, length in enumerate(seq_lens):
        for position in range(length):
            assert torch.equal(dense[request, position], rows[request][position])
        assert not dense[request, length:].any(), "padding is zero, though the null block holds NaN"
    flat = [row for request in rows for row in request]
    assert torch.equal(packed, torch.stack(flat) if flat else packed.new_empty(0, HEADS, SIZE))


def test_unused_entries_of_the_block_table_name_no_block() -> None:
    pages = nhd(2, 4)
    table = torch.tensor([[1, 10**6]], dtype=torch.int32)

    dense = gather_dense(pages, table, torch.tensor([3]), 8)

    assert torch.equal(dense[0, :3], pages[1, :3])
    assert not dense[0, 3:].any()


def padded_pages(blocks: int, block_size: int) -> Tensor:
    return torch.randn(blocks, block_size * HEADS * SIZE + 1)[:, :-1].view(blocks, block_size, HEADS, SIZE)


def padded_slots(blocks: int, block_size: int) -> Tensor:
    return torch.randn(blocks, block_size, HEADS, SIZE + 1)[..., :-1]


def heads_first_layers(blocks: int, block_size: int) -> Tensor:
    return torch.randn(blocks, 3, HEADS, block_size, SIZE)[:, 1].transpose(1, 2)


@given(
    st.sampled_from([nhd, hnd, layers_inside, heads_first_layers, padded_pages, padded_slots]),
    st.integers(1, 5),
    st.sampled_from([1, 2, 5]),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
)
def test_blocks_are_gathered_whole(
    layout: Callable[[int, int], Tensor], blocks: int, block_size: int, shape: tuple[int, int]
) -> None:
    pages = layout(blocks, block_size)
    table = torch.randint(0, blocks, shape, dtype=torch.int32)
    out = torch.empty(table.numel() * block_size * HEADS * SIZE)

    gathered = gather_blocks(pages, table, out)

    assert torch.equal(gathered, torch.stack([torch.stack([pages[block] for block in row]) for row in table.tolist()]))
    assert gathered.data_ptr() == out.data_ptr()
    assert gathered.permute(0, 3, 1, 2, 4).flatten(2, 3).data_ptr() == out.data_ptr(), "slots of a head are one axis"
