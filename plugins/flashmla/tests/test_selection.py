"""The slots of selected tokens: which of them the kernels read, and where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import CacheError
from attnplug_flashmla.selection import Places, mask_indices, places_of, rows_of
from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel, run_interpreted


def pages_apart(blocks: int, block_size: int, size: int, gap: int) -> torch.Tensor:
    """Return pages with so many elements between blocks; each element is its own number."""
    pool = torch.arange(blocks * (block_size * size + gap), dtype=torch.int32)
    return pool.view(blocks, -1)[:, : block_size * size].view(blocks, block_size, 1, size)


@given(
    blocks=st.integers(2, 5),
    block_size=st.sampled_from([1, 4, 64]),
    size=st.sampled_from([512, 576]),
    gap=st.sampled_from([0, 8, 576, 1000, 64 * 576]),
)
def test_each_slot_is_a_row(blocks: int, block_size: int, size: int, gap: int) -> None:
    pages = pages_apart(blocks, block_size, size, gap)

    rows, places = rows_of(pages)
    indices = torch.arange(blocks * block_size, dtype=torch.int32).unsqueeze(1)
    found = mask_indices(indices, None, places, 1)

    assert rows.data_ptr() == pages.data_ptr()
    assert torch.equal(rows[found[:, 0].long()], pages.flatten(0, 1))
    assert int(found[-1]) == len(rows) - 1
    assert places.are_slots == (gap == 0 or blocks == 1)
    assert rows.stride(0) % 8 == 0  # the kernel copies 16 bytes at multiples of them


def test_more_rows_than_int32_counts_are_refused() -> None:
    pages = torch.empty((2**20, 64, 1, 576), dtype=torch.bfloat16, device="meta")
    apart = pages.as_strided(pages.shape, (64 * 576 + 8, 576, 576, 1))

    assert rows_of(pages)[1].are_slots
    with pytest.raises(CacheError, match="multiple of 576 elements"):
        rows_of(apart)


@given(data=st.data(), topk=st.integers(1, 9), multiple=st.sampled_from([1, 4, 8]), has_lens=st.booleans())
def test_no_other_slot_is_read(data: st.DataObject, topk: int, multiple: int, has_lens: bool) -> None:
    """Negative numbers, numbers beyond the pages, and what is behind the length of a row."""
    values = st.one_of(st.integers(-2, 13), st.sampled_from([-(2**31), 2**31 - 1]))
    rows = data.draw(st.lists(st.lists(values, min_size=topk, max_size=topk), max_size=3))
    lens = [data.draw(st.integers(-1, topk + 1)) for _ in rows] if has_lens else None
    places = Places(slots=12, block_size=4, of_block=20, of_slot=2)

    found = mask_indices(
        torch.tensor(rows, dtype=torch.int32).view(-1, topk),
        None if lens is None else torch.tensor(lens, dtype=torch.int32),
        places,
        multiple,
    )

    assert found.dtype == torch.int32
    assert found.shape[1] == -(-topk // multiple) * multiple
    for number, (row, result) in enumerate(zip(rows, found.tolist(), strict=True)):
        read = topk if lens is None else lens[number]
        expected = [
            slot // 4 * 20 + slot % 4 * 2 if 0 <= slot < 12 and column < read else -1 for column, slot in enumerate(row)
        ]
        assert result == expected + [-1] * (found.shape[1] - topk)


def test_slots_are_kept_where_kernels_find_blocks() -> None:
    pages = pages_apart(3, 4, 656, 16)

    assert places_of(pages).are_slots
    assert mask_indices(torch.tensor([[11, 12, -1]], dtype=torch.int32), None, places_of(pages), 4).tolist() == [
        [11, -1, -1, -1]
    ]


@pytest.mark.slow
def test_the_kernel_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("test_selection_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("are_slots", [True, False])
def test_the_kernel_compiles(are_slots: bool) -> None:
    from attnplug_flashmla.triton_selection import _mask  # noqa: PLC0415 - needs Triton

    kinds = {"indices": "*i32", "lens": "*i32", "out": "*i32"}
    sizes = {"topk": 2048, "width": 2048, "block_size": 64, "of_slot": 1 if are_slots else 9}
    constants = {**sizes, "are_slots": are_slots, "has_lens": not are_slots, "tile": 1024}

    code = compile_kernel(_mask, kinds, constants, unaligned=["slots", "of_block"], num_warps=4).asm["ptx"]

    assert "st.global.v4" in code  # 16 bytes at a time
