"""K and V in their slots, and the pages that a KV cache has for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnplug.errors import CacheError, TensorError
from attnplug.ops import write, write_kv, write_pages
from tests.backends.triton_on_cpu import DIVISION, NEEDS_TRITON, compile_kernel, run_interpreted

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
# The first is for the CPU, the second for other devices. Both run here.
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
def test_the_null_block_keeps_its_bits(
    layout: Callable[[int, int], Tensor], writer: Callable[[Tensor, Tensor, Tensor], None]
) -> None:
    pages = layout(2, 4).fill_(torch.nan)

    writer(torch.ones(3, HEADS, SIZE), pages, torch.tensor([-1, 5, -1]))

    assert pages[0].isnan().all()
    assert (~pages.isnan()).sum() == HEADS * SIZE
    assert pages[1, 1].eq(1).all()


def test_extra_rows_are_not_read_and_dtypes_are_converted() -> None:
    pages = torch.zeros(2, 4, HEADS, SIZE, dtype=torch.bfloat16)
    rows = torch.full((3, HEADS, SIZE), torch.nan)
    rows[0] = 1 / 3

    write_pages(rows, pages, torch.tensor([6]))

    assert pages.count_nonzero() == HEADS * SIZE
    assert torch.equal(pages[1, 2], rows[0].bfloat16())


@pytest.mark.parametrize(("rows", "slots"), [((2, HEADS, SIZE), 3), ((3, HEADS, SIZE + 1), 3), ((3, 1, SIZE), 3)])
def test_wrong_shapes_leave_the_pages_unchanged(rows: tuple[int, ...], slots: int) -> None:
    pages = torch.zeros(2, 4, HEADS, SIZE)

    with pytest.raises(TensorError, match="3 slots were given"):
        write_pages(torch.ones(rows), pages, torch.arange(slots))

    assert not pages.any()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("blocks", "slot"), [((2, 2), 8), ((2, 1), 4), ((1, 2), 4)])
def test_a_slot_beyond_either_pages_writes_nothing(blocks: tuple[int, int], slot: int, padded: bool) -> None:
    key_pages, value_pages = (torch.zeros(count, 4, HEADS, SIZE) for count in blocks)
    rows = torch.ones(2, HEADS, SIZE)

    with pytest.raises(CacheError, match=f"slot {slot} was given"):
        write_kv(rows, rows, key_pages, value_pages, torch.tensor([1, slot]), padded=padded)
    with pytest.raises(TensorError, match="slots on meta"):
        write_kv(rows, rows, key_pages, value_pages, torch.tensor([1, 2], device="meta"), padded=padded)

    assert not key_pages.any()
    assert not value_pages.any()


@given(layouts, st.permutations(range(4, 16)), st.integers(0, 12))
def test_slots_without_padding_need_no_check(
    layout: Callable[[int, int], Tensor], slots: list[int], count: int
) -> None:
    pages, rows, mapping = layout(4, 4), torch.randn(13, HEADS, SIZE), torch.tensor(slots[:count], dtype=torch.int64)
    expected = pages.clone()
    write_pages(rows, expected, mapping)
    write_pages(rows, pages, mapping, padded=False)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_write_kv_writes_what_two_calls_of_write_pages_do(dtype: torch.dtype, padded: bool) -> None:
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 5)
    pages = [torch.zeros(2, 4, 2, size, dtype=torch.uint8).to(dtype) for size in (8, 5, 8, 5)]
    slots = torch.tensor([6, 4 if not padded else -1])
    scales = (torch.tensor(0.5), torch.tensor([0.3, 2.0]))

    write_kv(key, value, *pages[:2], slots, *scales, padded=padded)

    write_pages(key, pages[2], slots, scales[0])
    write_pages(value, pages[3], slots, scales[1])
    for got, wanted in zip(pages[:2], pages[2:], strict=True):
        assert wanted.float().any()
        assert torch.equal(got.float(), wanted.float())


def test_values_of_a_wrong_shape_leave_the_keys_unchanged() -> None:
    pages = torch.zeros(2, 2, 4, 2, 8)

    with pytest.raises(TensorError, match="2 slots were given"):
        write_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 7), *pages, torch.tensor([4, 5]))

    assert not pages.any()


@pytest.mark.slow
def test_the_kernel_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("test_write_kv_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, "gfx90a", "gfx1100"])
@pytest.mark.parametrize(
    ("rows", "pages", "mantissa", "scales"),
    [("i16", "i16", -1, 0), ("bf16", "u8", 3, 1), ("fp32", "u8", 2, 4), ("fp32", "i16", 7, 0)],
)
def test_the_kernel_compiles(rows: str, pages: str, mantissa: int, scales: int, capability: int | str) -> None:
    from attnplug.ops.triton_write import _kernel  # noqa: PLC0415 - needs Triton

    names = _kernel.arg_names
    half = (4, 128, True, 16, 2 * 16 * 4 * 128, 128, 16 * 128, 1, mantissa, scales)
    kinds = dict(zip(names, (f"*{rows}", f"*{rows}", f"*{pages}", f"*{pages}", "*i64", "*fp32", "*fp32"), strict=False))
    constants = dict(zip(names[11:], (*half, *half, 8, 512), strict=True))

    code = compile_kernel(_kernel, kinds, constants, unaligned=names[4:11], capability=capability, num_warps=2).asm

    if isinstance(capability, str):
        assert any(f"load_{width}" in code["amdgcn"] for width in ("dwordx2", "dwordx4", "b128"))
        return
    code = code["ptx"]
    assert "ld.global.v4" in code  # 16 bytes at a time
    assert ("st.global.v2" if pages == "u8" else "st.global.v4") in code
    assert ".ftz" not in code.replace(DIVISION, "")
    assert (DIVISION in code) == bool(scales)


def test_slots_whose_memory_was_freed_are_refused() -> None:
    rows, pages, slots = torch.ones(4, 1, 8), torch.zeros(3, 4, 1, 8), torch.arange(4, 8)
    slots.untyped_storage().resize_(0)

    with pytest.raises(TensorError, match="memory was freed"):
        write_kv(rows, rows, pages, pages.clone(), slots)
    assert not pages.any()
