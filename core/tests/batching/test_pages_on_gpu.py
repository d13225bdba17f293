"""Pages packed or written in one launch: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnplug.batching import Pages, SlotTable, pad_pages, pages_of
from attnplug.contract import Batch, capture
from tests.backends.harness import no_synchronization
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED

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


class Slots:
    """An engine's table of slots, and what a step reads from it; rows and lengths in random order."""

    def __init__(
        self, generator: random.Random, num_reqs: int, positions: int, block_size: int, *, query_len: int = 1
    ) -> None:
        blocks = list(range(1, 1 + num_reqs * positions // block_size))
        generator.shuffle(blocks)
        firsts = torch.tensor(blocks).view(num_reqs, -1, 1) * block_size
        self.table = (firsts + torch.arange(block_size)).view(num_reqs, positions).int().to(DEVICE)
        self.rows = torch.tensor(generator.sample(range(num_reqs), num_reqs), device=DEVICE)
        padding = generator.randint(0, num_reqs - 1)
        lens = [generator.randint(1, positions - query_len) for _ in range(num_reqs - padding)] + [0] * padding
        lens[0] = positions - query_len
        dtype = generator.choice([torch.int32, torch.int64])
        self.lengths = torch.tensor(lens, dtype=dtype, device=DEVICE)
        self.new = torch.tensor(generator.sample(range(1, 9000), (num_reqs - padding) * query_len), device=DEVICE)
        size = int(self.table.max()) + block_size + 9000
        self.translation = torch.randperm(size // block_size).repeat_interleave(block_size) * block_size
        self.translation = (self.translation + torch.arange(len(self.translation)) % block_size).to(DEVICE)

    def written(
        self, block_size: int, query_len: int, added: int, *, is_translated: bool, fallback: bool
    ) -> list[Tensor]:
        """Return block table, lengths and slots as the kernel writes them, or plain torch."""
        table = torch.full((len(self.rows), self.table.shape[1] // block_size + 2), -7, dtype=torch.int32)
        out = [table, torch.full_like(table[:, 0], -7), torch.full((len(self.rows) * query_len,), -7)]
        given = [self.table, self.rows, self.lengths, self.new]
        translation = self.translation if is_translated else None
        if not fallback and INTERPRETED:
            from attnplug.batching.triton_pages import write_from_slots  # noqa: PLC0415 - there is Triton where this runs

            write_from_slots(given, translation, out, (table.shape[1] - 2, block_size, query_len, added))  # type: ignore[arg-type]
            return out
        place = "cpu" if fallback else DEVICE
        slots, *rest = (tensor.to(place) for tensor in given)
        out = [tensor.to(place) for tensor in out]
        SlotTable(slots, block_size, None if translation is None else translation.to(place)).write(
            *rest,
            **dict(zip(("block_table", "seq_lens", "slot_mapping"), out, strict=True)),
            query_len=query_len,
            num_new_tokens=added,
        )
        return [tensor.cpu() for tensor in out]


@pytest.mark.parametrize(
    ("num_reqs", "positions", "block_size", "query_len"),
    [(1, 3, 1, 1), (1, 9000, 1, 1), (5, 600, 1, 1), (3, 48, 16, 1), (7, 64, 16, 4), (2, 40, 1, 3)],
)
def test_kernel_and_torch_write_the_same(num_reqs: int, positions: int, block_size: int, query_len: int) -> None:
    slots = Slots(random.Random(num_reqs), num_reqs, positions, block_size, query_len=query_len)
    added = query_len if query_len > 1 else 0
    lens = [length + added if length else 0 for length in slots.lengths.tolist()]
    for is_translated in (False, True):
        numbers = (block_size, query_len, added)
        table, seq_lens, new = slots.written(*numbers, is_translated=is_translated, fallback=False)
        expected = slots.written(*numbers, is_translated=is_translated, fallback=True)
        assert seq_lens.tolist() == expected[1].tolist() == lens
        assert torch.equal(new, expected[2])
        assert new[len(slots.new) :].eq(-1).all()
        for row, wanted, length, of_table in zip(table, expected[0], lens, slots.rows.tolist(), strict=True):
            used = -(-length // block_size)
            firsts = slots.table[of_table, : used * block_size : block_size].long()
            firsts = slots.translation[firsts] if is_translated else firsts
            assert row[:used].tolist() == wanted[:used].tolist() == (firsts // block_size).tolist()
            nulls = 0 if length else min(query_len, len(row) - 2)
            assert not row[used:][:nulls].any()
            assert not wanted[used:][:nulls].any()
            assert row[used + nulls :].eq(-7).all()  # the kernel leaves alone what is behind them


@pytest.mark.gpu
def test_a_graph_records_what_is_written() -> None:
    slots = Slots(random.Random(0), 9, 640, 16)
    table = torch.zeros(9, slots.table.shape[1] // 16, dtype=torch.int32, device=DEVICE)
    seq_lens, new = torch.zeros_like(table[:, 0]), torch.zeros(9, dtype=torch.int64, device=DEVICE)
    given = (slots.rows, slots.lengths, slots.new)
    out = {"block_table": table, "seq_lens": seq_lens, "slot_mapping": new}
    _, replay = capture(lambda: SlotTable(slots.table, 16).write(*given, **out), torch.device(DEVICE))
    for _ in range(2):
        slots.lengths.clamp_(min=1).add_(1)
        slots.rows.copy_(slots.rows.flip(0))
        replay()
        assert torch.equal(seq_lens, slots.lengths.int())
        assert torch.equal(table[:, 0], slots.table[slots.rows, 0] // 16)


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

    with no_synchronization():
        pages: Pages = pages_of(batch, 16)
        copies = (pages.indptr, pages.last_page_len)

    assert torch.equal(pages.indices, table.reshape(-1))
    assert [copy.shape[0] for copy in copies] == [num_reqs + 1, num_reqs]
