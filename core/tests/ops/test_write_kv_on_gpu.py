"""K and V in one launch, against `write_pages` to the bit: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import random  # noqa: TC003 - hypothesis reads annotations
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnplug.errors import TensorError
from attnplug.ops import quantize, write_kv, write_pages
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS

F32, BF16, F16, E4M3, E5M2 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
PAIRS = [
    (F32, F32), (BF16, BF16), (F16, F16), (E4M3, E4M3), (E5M2, E5M2), (torch.uint8, torch.uint8),
    (F32, BF16), (F16, BF16), (F32, F16), (BF16, F16), (BF16, F32), (F16, F32),
    (F32, E4M3), (BF16, E4M3), (F16, E4M3), (F32, E5M2), (BF16, E5M2), (F16, E5M2),
]  # fmt: skip
HEADS, BLOCKS = 2, 4


def written(*arguments: object) -> None:
    if not INTERPRETED:
        write_kv(*arguments)  # type: ignore[arg-type]
        return
    from attnplug.ops.triton_write import write  # noqa: PLC0415 - there is Triton where this runs

    assert write(*arguments, *[None] * (7 - len(arguments))), "the kernel takes these"  # type: ignore[arg-type]


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(INTEGERS[tensor.itemsize])


class Half(NamedTuple):
    """K or V: rows, and the memory that holds pages with canaries around them."""

    rows: Tensor
    memory: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    scale: Tensor | None

    def pages(self, memory: Tensor) -> Tensor:
        return memory.as_strided(self.shape, self.strides, self.offset)


def some_rows(generator: random.Random, shape: tuple[int, ...], dtype: torch.dtype, *, exactly: bool) -> Tensor:
    """Any bits where they are copied; else numbers of all magnitudes, infinite ones and zeros of both signs."""
    torch.manual_seed(generator.randrange(2**32))
    if exactly:
        low, high = (
            (0, 256) if dtype.itemsize == 1 else (-(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1))
        )
        return torch.randint(low, high, shape, dtype=INTEGERS[dtype.itemsize]).view(dtype)
    rows = torch.randn(shape) * 10 ** (4 * torch.randn(shape))
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 448.0, 464.0, -57344.0, 61440.0, 2.0**-10, 3e-39])
    if INTERPRETED and dtype == BF16:
        special = special[:-1]  # the interpreter widens subnormal numbers of this dtype wrongly, and nothing else does
    chosen = special[torch.randint(len(special), shape)]
    return torch.where(torch.rand(shape) < 0.2, chosen, rows).to(dtype)


def strided(generator: random.Random, rows: Tensor) -> Tensor:
    """The same rows in another order in memory, or between others."""
    kind = generator.choice(["plain", "fused", "heads first", "elements apart", "misplaced"])
    if kind == "plain":
        return rows
    if kind == "fused":
        return torch.cat([rows.new_empty(rows.shape), rows, rows.new_empty(rows.shape)], 1)[:, HEADS : 2 * HEADS]
    if kind == "heads first":
        return rows.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "elements apart":
        return rows.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.cat([rows.new_empty(1), rows.reshape(-1)])[1:].view(rows.shape)


def half_of(generator: random.Random, tokens: int, size: int, block_size: int) -> Half:
    source, target = generator.choice(PAIRS)
    rows = some_rows(generator, (tokens, HEADS, size), source, exactly=source == target)
    shape = (BLOCKS, block_size, HEADS, size)
    kind = generator.choice(["NHD", "HND", "inside", "HND inside", "padded", "heads slowest", "sizes first"])
    strides = {
        "NHD": (block_size * HEADS * size, HEADS * size, size, 1),
        "HND": (block_size * HEADS * size, size, block_size * size, 1),
        "inside": (2 * block_size * HEADS * size, HEADS * size, size, 1),
        "HND inside": (2 * block_size * HEADS * size, size, block_size * size, 1),
        "padded": (block_size * HEADS * (size + 5) + 3, HEADS * (size + 5), size + 5, 1),
        "heads slowest": (block_size * size, size, BLOCKS * block_size * size, 1),
        "sizes first": (block_size * HEADS * size, 1, block_size, block_size * HEADS),
    }[kind]
    offset = generator.choice([0, 16, 1])
    length = offset + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True)) + 1 + 7
    memory = torch.randint(0, 120, (length * target.itemsize,), dtype=torch.uint8).view(target)
    scale = generator.choice([None, torch.tensor(0.3), torch.tensor([7.0]), torch.tensor([0.004, 1.7])])
    return Half(strided(generator, rows), memory, shape, strides, offset, scale)


def some_slots(generator: random.Random, tokens: int, block_size: int) -> Tensor:
    free = list(range(block_size, BLOCKS * block_size))
    chosen = generator.sample(free, min(len(free), tokens))
    return torch.tensor([-1 if generator.random() < 0.2 else slot for slot in chosen], dtype=torch.int64)


@settings(max_examples=60 if INTERPRETED else 25)
@given(st.randoms(use_true_random=False), st.integers(0, 6), st.sampled_from([3, 16, 72]), st.sampled_from([16, 80]))
def test_slots_hold_what_write_pages_writes(generator: random.Random, tokens: int, size: int, size_v: int) -> None:
    block_size = generator.choice([1, 3, 16])
    halves = [half_of(generator, tokens + 2, each, block_size) for each in (size, size_v)]
    slots = some_slots(generator, tokens, block_size)
    expected = [half.memory.clone() for half in halves]
    for half, memory in zip(halves, expected, strict=True):
        write_pages(half.rows, half.pages(memory), slots, half.scale)

    memories = [half.memory.to(DEVICE) for half in halves]
    # To a device goes the whole storage: what is copied alone would be contiguous there.
    rows = [on_device(half.rows) for half in halves]
    scales = [None if half.scale is None else half.scale.to(DEVICE) for half in halves]
    pages = [half.pages(memory) for half, memory in zip(halves, memories, strict=True)]
    for _ in range(2):  # the first compiles, and the second runs what the first has compiled
        for memory, half in zip(memories, halves, strict=True):
            memory.view(torch.uint8).copy_(half.memory.view(torch.uint8))
        written(*rows, *pages, slots.to(DEVICE), *scales)
        for memory, wanted in zip(memories, expected, strict=True):
            assert torch.equal(bits(memory), bits(wanted))


def on_device(rows: Tensor) -> Tensor:
    flat = rows.as_strided((rows.untyped_storage().nbytes() // rows.itemsize,), (1,), 0)
    return flat.to(DEVICE).as_strided(rows.shape, rows.stride(), rows.storage_offset())


def boundaries(dtype: torch.dtype) -> Tensor:
    """Every number of an 8-bit float, every middle between two, and the float32 on each side of these."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    numbers = codes[codes.isfinite()].unique()
    ends = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    return torch.cat([ends, ends.nextafter(torch.tensor(torch.inf)), ends.nextafter(torch.tensor(-torch.inf))])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [F32, BF16, F16])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_every_number_rounds_as_quantize_rounds_it(
    source: torch.dtype, dtype: torch.dtype, scale: float | None
) -> None:
    numbers = (
        boundaries(dtype) if source == F32 else torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(source)
    )
    rows = torch.zeros(-(-numbers.numel() // 2048) * 2048, dtype=source)
    rows[: numbers.numel()] = numbers
    rows = rows.view(-1, 2, 1024)
    tensor = None if scale is None else torch.tensor(scale)
    pages = [
        torch.zeros(1 + rows.shape[0], 1, *rows.shape[1:], dtype=torch.uint8, device=DEVICE).view(dtype) for _ in "kv"
    ]
    slots = torch.arange(1, 1 + rows.shape[0], device=DEVICE)
    scales = [None if tensor is None else tensor.to(DEVICE)] * 2

    written(*[rows.to(DEVICE)] * 2, *pages, slots, *scales)

    wanted = quantize(rows, dtype, tensor)
    for each in pages:
        got = each.view(torch.uint8)[1:, 0].cpu().view(dtype)
        assert torch.equal(got.float().isnan(), wanted.float().isnan())
        numbers = ~wanted.float().isnan()
        assert torch.equal(bits(got)[numbers], bits(wanted)[numbers])


@pytest.mark.parametrize(("source", "target"), [(F32, BF16), (F32, F16), (BF16, F32), (BF16, E4M3), (F16, E5M2)])
def test_nan_stays_nan_and_the_null_block_keeps_its_bits(source: torch.dtype, target: torch.dtype) -> None:
    rows = torch.full((3, 2, 16), torch.nan, dtype=source, device=DEVICE)
    rows[1] = 1.5
    pages = [torch.full((2 * 4 * 2 * 16 * target.itemsize,), 0x7F, dtype=torch.uint8, device=DEVICE) for _ in "kv"]
    pages = [each.view(target).view(2, 4, 2, 16) for each in pages]

    written(rows, rows, *pages, torch.tensor([5, -1, 6], device=DEVICE))

    for each in (page.view(torch.uint8).cpu().view(target) for page in pages):
        assert each[1, 1:3].float().isnan().all()
        assert each[1, 1:3].numel() == 64
        for block, slot in ((0, slice(None)), (1, 0), (1, 3)):
            assert (each.view(torch.uint8)[block, slot] == 0x7F).all()


def test_many_heads_take_several_programs() -> None:
    rows = torch.randn(3, 40, 80, device=DEVICE)
    pages = [torch.zeros(2, 4, 40, 80, device=DEVICE) for _ in "kv"]

    written(rows, -rows, *pages, torch.tensor([7, 4, -5], device=DEVICE))

    for each, wanted in zip(pages, (rows, -rows), strict=True):
        assert torch.equal(each[1, 3], wanted[0])
        assert torch.equal(each[1, 0], wanted[1])
        assert each.count_nonzero() == 2 * 40 * 80


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", ["heads", "size", "tokens", "value"])
def test_what_does_not_fit_is_refused_and_nothing_written(wrong: str) -> None:
    shape = {"heads": (3, 1, 8), "size": (3, 2, 9), "tokens": (2, 2, 8), "value": (3, 2, 8)}[wrong]
    key = torch.ones(shape, device=DEVICE)
    value = torch.ones(3, 2, 7 if wrong == "value" else 8, device=DEVICE)
    pages = [torch.zeros(2, 4, 2, 8, device=DEVICE) for _ in "kv"]

    with pytest.raises(TensorError, match="3 slots were given"):
        write_kv(key, value, *pages, torch.tensor([4, 5, 6], device=DEVICE))

    assert not pages[0].any()
    assert not pages[1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_what_the_kernel_does_not_know_is_written_by_torch(dtype: torch.dtype) -> None:
    rows = torch.arange(48, device=DEVICE).view(3, 2, 8).to(dtype)
    pages = [torch.zeros(2, 4, 2, 8, device=DEVICE) for _ in "kv"]

    write_kv(rows, rows, *pages, torch.tensor([4, -1, 6], device=DEVICE))

    assert torch.equal(pages[0][1, 2], rows[2].float())
    assert torch.equal(pages[0], pages[1])


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("target", [BF16, E4M3])
def test_the_device_is_never_waited_for_and_nothing_is_allocated(no_waiting: None, target: torch.dtype) -> None:
    rows = torch.randn(5, 2, 64, device="cuda", dtype=BF16)
    pages = torch.zeros(3, 2, 4, 2, 64, device="cuda", dtype=BF16).to(target)
    slots, scale = torch.arange(4, 9, device="cuda"), torch.ones(1, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    for _ in range(3):
        write_kv(rows, rows, pages[:, 0], pages[:, 1], slots, scale, scale)

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_a_graph_replays_other_rows_into_other_slots() -> None:
    rows = torch.zeros(4, 2, 64, device="cuda", dtype=BF16)
    pages = torch.zeros(4, 2, 4, 2, 64, device="cuda", dtype=BF16)
    slots = torch.full((4,), -1, device="cuda")
    halves = (pages[:, 0], pages[:, 1])
    write_kv(rows, rows, *halves, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv(rows, rows, *halves, slots)

    for chosen in ([4, 9, -1, 15], [-1, -1, 8, -1]):
        pages.zero_()
        rows.normal_()
        slots.copy_(torch.tensor(chosen))
        graph.replay()
        for token, slot in enumerate(chosen):
            if slot >= 0:
                assert all(torch.equal(half[slot // 4, slot % 4], rows[token]) for half in halves)
        assert pages.count_nonzero() == 2 * sum(rows[i].count_nonzero() for i, slot in enumerate(chosen) if slot >= 0)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["blocks", "halves"])
def test_caches_beyond_32_bits(layout: str) -> None:
    blocks = 2**31 // (16 * 2 * 64) // 2 + 8
    shape = (blocks, 2, 16, 2, 64) if layout == "blocks" else (2, blocks, 16, 2, 64)
    memory = torch.empty(shape, device="cuda", dtype=BF16)
    halves = (memory[:, 0], memory[:, 1]) if layout == "blocks" else (memory[0], memory[1])
    assert memory.numel() > 2**31
    rows = torch.randn(2, 2, 64, device="cuda", dtype=BF16)
    for half in halves:
        half[:2].zero_()

    write_kv(rows, -rows, *halves, torch.tensor([16 * blocks - 1, 16], device="cuda"))

    for half, wanted in zip(halves, (rows, -rows), strict=True):
        assert torch.equal(half[blocks - 1, 15], wanted[0])
        assert torch.equal(half[1, 0], wanted[1])
        assert not half[0].any()
        assert half[1].count_nonzero() == 2 * 64
