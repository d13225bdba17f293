"""Pages packed in one launch: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnplug.batching import Pages, pad_pages, pages_of
from attnplug.contract import Batch
from tests.backends.triton_on_cpu import INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


def indices_of(batch: Batch, block_size: int) -> Tensor:
    if not INTERPRETED:
        return pages_of(batch, block_size).indices.cpu()
    from attnplug.batching.triton_pages import pack  # noqa: PLC0415 - there is Triton where this runs

    counts = [-(-length // block_size) for length in batch.seq_lens.tolist()]
    return pack(batch.block_table, batch.seq_lens, block_size, sum(counts), max(counts))  # type: ignore[arg-type]


def strided(generator: random.Random, table: Tensor) -> Tensor:
    kind = generator.choice(["plain", "columns first", "later columns", "every other row"])
    if kind == "columns first":
        return table.t().contiguous().t()
    if kind == "later columns":
        return torch.cat([table, table], 1)[:, table.shape[1] :]
    return table.repeat_interleave(2, 0)[::2] if kind == "every other row" else table


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 3, 33]), st.sampled_from([1, 3, 16]))
@example(random.Random(1), 1100, 16)  # more than are counted at a time
def test_lists_the_pages_in_use(generator: random.Random, num_reqs: int, block_size: int) -> None:
    longest = generator.choice([0, 5, 90])
    seq_lens = [generator.randint(0, longest) for _ in range(num_reqs)]
    if num_reqs < 10:
        seq_lens[-1] += 520 * block_size
    columns = max(-(-length // block_size) for length in seq_lens) + generator.randint(0, 2)
    table = torch.arange(1, 1 + num_reqs * columns, dtype=torch.int32).view(num_reqs, columns)
    wanted = [row[: -(-length // block_size)] for row, length in zip(table, seq_lens, strict=True)]
    on = strided(generator, table if INTERPRETED else table.cuda())
    batch = Batch.from_lengths([min(length, 1) for length in seq_lens], seq_lens, block_table=on)

    for _ in range(1 if INTERPRETED else 2):  # the first compiles, and the second runs what the first has compiled
        batch.derived.clear()
        assert torch.equal(indices_of(batch, block_size), torch.cat(wanted))


@pytest.mark.gpu
def test_the_copies_on_the_device_are_those_of_the_host() -> None:
    lens = [3, 0, 40, 16] * 20
    table = torch.randint(1, 99, (80, 3), dtype=torch.int32, device="cuda")

    pages = pages_of(Batch.from_lengths([min(length, 1) for length in lens], lens, block_table=table), 16)

    assert pages.indptr.is_cuda
    assert pages.indptr is pages.indptr
    assert torch.equal(pages.indptr.cpu(), pages.indptr_cpu)
    assert torch.equal(pages.last_page_len.cpu(), pages.last_page_len_cpu)
    assert torch.equal(pad_pages(pages, 90).indptr.cpu(), pad_pages(pages, 90).indptr_cpu)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("num_reqs", [4, 256])
def test_the_device_is_never_waited_for(num_reqs: int) -> None:
    table = torch.randint(1, 99, (num_reqs, 5), dtype=torch.int32, device="cuda")
    lens = torch.full((num_reqs,), 70, dtype=torch.int32)
    batch = Batch.from_lengths([1] * num_reqs, lens.tolist(), block_table=table)
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    try:
        pages: Pages = pages_of(batch, 16)
        copies = (pages.indptr, pages.last_page_len)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.equal(pages.indices, table.reshape(-1))
    assert [copy.shape[0] for copy in copies] == [num_reqs + 1, num_reqs]
