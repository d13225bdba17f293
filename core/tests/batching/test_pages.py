from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from attnplug.batching import SlotTable, pad_batch, pad_pages, pages_of
from attnplug.contract import Batch
from attnplug.errors import BatchError
from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel, run_interpreted

# Few requests are counted by lists, many by tensors.
few_and_many = st.lists(st.integers(0, 40), min_size=1, max_size=6) | st.lists(
    st.integers(0, 40), min_size=30, max_size=50
)


@given(few_and_many, st.sampled_from([1, 3, 16]), st.integers(0, 2))
def test_lists_the_pages_in_use(seq_lens: list[int], block_size: int, spare_columns: int) -> None:
    columns = max(-(-n // block_size) for n in seq_lens) + spare_columns
    table = torch.randint(1, 99, (len(seq_lens), columns), dtype=torch.int32)
    batch = Batch.from_lengths([min(n, 1) for n in seq_lens], seq_lens, block_table=table)

    pages = pages_of(batch, block_size)

    for request, length in enumerate(seq_lens):
        start, end = pages.indptr[request : request + 2].tolist()
        assert pages.indices[start:end].tolist() == table[request, : -(-length // block_size)].tolist()
        assert (end - start - 1) * block_size + int(pages.last_page_len[request]) == (length or -block_size)
    assert pages.indptr_cpu.tolist() == pages.indptr.tolist()
    assert pages.last_page_len_cpu.tolist() == pages.last_page_len.tolist()


def test_fake_tensors_are_not_kept() -> None:
    def many() -> Batch:
        return Batch.from_lengths([1] * 40, block_table=torch.ones(40, 1, dtype=torch.int32))

    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        pages_of(many(), 7)

    assert pages_of(many(), 7).indptr.tolist() == list(range(41))


def test_is_computed_once_per_batch() -> None:
    batch = Batch.from_lengths([1], [3], block_table=torch.ones(1, 1, dtype=torch.int32))

    assert pages_of(batch, 16) is pages_of(batch, 16)
    assert pages_of(batch, 4) is not pages_of(batch, 16)


@pytest.mark.parametrize("more", [0, 60])
def test_a_block_table_that_is_too_short_is_refused(more: int) -> None:
    lens = [3, 40] + [5] * more
    batch = Batch.from_lengths([1] * len(lens), lens, block_table=torch.ones(len(lens), 2, dtype=torch.int32))

    with pytest.raises(BatchError, match="request 1 has 40 keys, 3 pages"):
        pages_of(batch, 16)


@pytest.mark.parametrize("missing", ["block_table", "seq_lens_cpu"])
def test_pages_and_cpu_lengths_are_required(missing: str) -> None:
    batch = Batch.from_lengths([1], [3], block_table=torch.ones(1, 1, dtype=torch.int32))

    with pytest.raises(BatchError, match=f"{missing}=absent"):
        pages_of(evolve(batch, **{missing: None}), 16)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 5))
def test_padded_pages_are_the_pages_of_the_padded_batch(seq_lens: list[int], more_reqs: int, more_pages: int) -> None:
    table = torch.randint(1, 99, (len(seq_lens), -(-max(seq_lens) // 4)), dtype=torch.int32)
    batch = Batch.from_lengths([min(n, 1) for n in seq_lens], seq_lens, block_table=table)
    plain, reqs = pages_of(batch, 4), len(seq_lens) + more_reqs
    count = plain.indices.shape[0]

    padded = pad_pages(plain, reqs, count + more_pages)

    expected = pages_of(pad_batch(batch, reqs), 4)
    for name in ("indptr", "last_page_len", "indptr_cpu", "last_page_len_cpu"):
        assert torch.equal(getattr(padded, name), getattr(expected, name))
        assert getattr(padded, name).dtype == torch.int32
    assert padded.indptr[len(seq_lens) :].tolist() == [count] * (more_reqs + 1)
    assert padded.last_page_len[len(seq_lens) :].tolist() == [0] * more_reqs
    assert padded.indices.tolist() == plain.indices.tolist() + [0] * more_pages


@pytest.mark.parametrize("sizes", [(1, None), (2, 2)])
def test_padding_drops_neither_requests_nor_pages(sizes: tuple[int, int | None]) -> None:
    batch = Batch.from_lengths([1, 1], [3, 7], block_table=torch.ones(2, 2, dtype=torch.int32))

    with pytest.raises(BatchError, match="are to be padded to"):
        pad_pages(pages_of(batch, 4), *sizes)


@pytest.mark.slow
def test_the_kernel_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("test_pages_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.slow
def test_the_kernel_compiles() -> None:
    from attnplug.batching.triton_pages import _kernel  # noqa: PLC0415 - needs Triton

    kinds = {**dict.fromkeys(("table", "seq_lens", "indices"), "*i32"), "columns": "i32", "num_pages": "i32"}
    constants = {"block_size": 16, "lanes": 1024, "tile": 512}

    assert compile_kernel(_kernel, kinds, constants, unaligned=_kernel.arg_names).asm["cubin"]


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("is_translated", [True, False])
def test_the_kernel_of_slot_tables_compiles(is_translated: bool) -> None:
    from attnplug.batching.triton_pages import _write_from_slots  # noqa: PLC0415 - needs Triton

    kinds = dict.fromkeys(("slot_table", "block_table", "seq_lens"), "*i32")
    kinds |= dict.fromkeys(("rows", "lengths", "slots", "translation", "slot_mapping"), "*i64")
    kinds |= dict.fromkeys(("columns", "num_slots", "num_new_tokens"), "i32")
    constants = {"block_size": 16, "query_len": 3, "lanes": 4, "parts": 16, "tile": 512, "no_slot": -1, "null_block": 0}
    constants["is_translated"] = is_translated

    assert compile_kernel(_write_from_slots, kinds, constants).asm["cubin"]


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("is_translated", [False, True])
def test_a_step_of_a_slot_table(block_size: int, is_translated: bool) -> None:
    table = torch.arange(16, 16 + 48, dtype=torch.int32).view(3, 16)
    lengths, rows = torch.tensor([5, 13, 0]), torch.tensor([2, 0, 0])
    out = torch.full((3, 9), 99, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32), torch.full((6,), 9)
    other = torch.arange(64).add(block_size) if is_translated else None
    shift = block_size if is_translated else 0
    width = 16 // block_size if block_size > 1 else 9  # as many as fit

    SlotTable(table, block_size, other).write(
        *(rows, lengths, torch.tensor([55, 56, 30, 31])),
        **dict(zip(("block_table", "seq_lens", "slot_mapping"), out, strict=True)),
        query_len=2,
        num_new_tokens=2,
    )

    assert out[1].tolist() == [7, 15, 0]
    assert out[0][2, :2].tolist() == [0, 0]
    assert out[2].tolist() == [55 + shift, 56 + shift, 30 + shift, 31 + shift, -1, -1]
    for row, first, length in ((0, 48, 7), (1, 16, 15)):
        used = min(-(-length // block_size), width)
        assert out[0][row, :used].tolist() == [(first + shift) // block_size + column for column in range(used)]


def test_a_slot_table_with_fewer_new_slots_than_tokens() -> None:
    """An engine passes the slots of its requests, and the graph has tokens of padding."""
    out = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    table, rows = torch.arange(8).view(4, 2) + 8, torch.arange(4)
    SlotTable(table, 1).write(
        *(rows, torch.tensor([2, 1, 0, 0]), torch.tensor([9, 10])),
        **dict(zip(("block_table", "seq_lens", "slot_mapping"), out, strict=True)),
    )
    assert (out[0][0].tolist(), out[0][1, 0].item()) == ([8, 9], 10)
    assert (out[1].tolist(), out[2].tolist()) == ([2, 1, 0, 0], [9, 10, -1, -1])
