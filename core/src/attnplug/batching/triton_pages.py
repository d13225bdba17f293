"""Packs and writes block tables, in one launch each. Imported only where Triton works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from attnplug.batching.padding import NULL_BLOCK
from attnplug.contract.inputs.batch import PAD_SLOT_ID
from attnplug.ops.triton import Kernel, Launch

if TYPE_CHECKING:
    from torch import Tensor

_TILE: Final = 512
"""Pages of a program."""

_LANES: Final = 1024
"""Requests whose pages a program counts at a time, to find the first page of its own request."""

_PARTS: Final = 16
"""Programs that share the blocks of a long request: a graph is launched for the longest."""

_launches: dict[tuple[object, ...], Launch] = {}


def pack(table: Tensor, seq_lens: Tensor, block_size: int, num_pages: int, most: int) -> Tensor:
    """
    Return ``(num_pages,)`` int32 physical blocks, one request after another.

    The first page of a request is counted on the device, so that nothing is uploaded.

    Args:
        table: ``(num_reqs, max_blocks)`` integers, of any strides.
        seq_lens: ``(num_reqs,)`` integers on the same device, contiguous, equal to the CPU sequence lengths.
        block_size: Slots per block.
        num_pages: Pages of all requests.
        most: Pages of the longest request.
    """
    device, (num_reqs, columns) = table.get_device(), table.shape
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return pack(table, seq_lens, block_size, num_pages, most)
    indices = torch.empty(num_pages, dtype=torch.int32, device=table.device)
    if not num_pages:
        return indices
    form = (device, table.dtype, seq_lens.dtype, block_size)
    launch = _launches.get(form)
    if launch is None:
        launch = _launches[form] = Launch(_kernel, (block_size, _LANES, _TILE), num_warps=4)
    grid, (of_request, of_column) = (num_reqs, -(-most // _TILE), 1), table.stride()
    if launch.is_compiled:
        addresses = (table.data_ptr(), seq_lens.data_ptr(), indices.data_ptr())
        launch.again(grid, *addresses, of_request, of_column, columns, num_pages)
    else:
        launch.first(grid, table, seq_lens, indices, of_request, of_column, columns, num_pages)
    return indices


@triton.jit(
    do_not_specialize=["of_request", "of_column", "columns", "num_pages"],
    do_not_specialize_on_alignment=["table", "seq_lens", "indices"],
)
def _kernel(
    table: tl.tensor,
    seq_lens: tl.tensor,
    indices: tl.tensor,
    of_request: tl.int64,
    of_column: tl.int64,
    columns: tl.int32,
    num_pages: tl.int32,
    block_size: tl.constexpr,
    lanes: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Pack one tile of the pages of one request per program."""
    request = tl.program_id(0)
    first, start = 0, 0
    while start < request:
        before = start + tl.arange(0, lanes)
        lengths = tl.load(seq_lens + before, mask=before < request, other=0).to(tl.int32)
        first += tl.sum((lengths + (block_size - 1)) // block_size, axis=0)
        start += lanes
    count = (tl.load(seq_lens + request).to(tl.int32) + (block_size - 1)) // block_size
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    # The bounds hold for lengths that equal the CPU's. They keep other lengths from accessing memory out of bounds.
    used = (column < count) & (column < columns) & (first + column < num_pages)
    blocks = tl.load(table + request.to(tl.int64) * of_request + column * of_column, mask=used)
    tl.store(indices + first + column, blocks.to(tl.int32), mask=used)


def write_from_slots(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    translation: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[int, int, int, int],
) -> None:
    """
    Launch what `SlotTable.write` describes.

    Args:
        given: The table of slots, rows, lengths and new slots.
        translation: That of the table.
        out: Block table, sequence lengths and slot mapping.
        numbers: Columns that both tables have, the block size, the query length and the tokens that lengths leave out.
    """
    (slots, _, _, new_slots), (block_table, _, _) = given, out
    columns, block_size, query_len, num_new_tokens = numbers
    parts = max(1, min(_PARTS, -(-columns // _TILE)))
    _from_slots.run(
        block_table.shape[0] * parts,
        (*given, slots if translation is None else translation, *out),
        (slots.stride(0), block_table.stride(0)),
        (columns, new_slots.shape[0], num_new_tokens),
        (
            *(block_size, query_len, triton.next_power_of_2(query_len), parts, _TILE),
            *(translation is not None, PAD_SLOT_ID, NULL_BLOCK),
        ),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["columns", "num_slots", "num_new_tokens"])
def _write_from_slots(
    slot_table: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    slots: tl.tensor,
    translation: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    of_row: tl.int64,
    of_request: tl.int64,
    columns: tl.int32,
    num_slots: tl.int32,
    num_new_tokens: tl.int32,
    block_size: tl.constexpr,
    query_len: tl.constexpr,
    lanes: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    is_translated: tl.constexpr,
    no_slot: tl.constexpr,
    null_block: tl.constexpr,
) -> None:
    """Write a part of the blocks of one request per program; the first one writes its length and slots too."""
    request, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    length = tl.load(lengths + request).to(tl.int32)
    length = tl.where(length > 0, length + num_new_tokens, 0)
    if part == 0:
        tl.store(seq_lens + request, length)
        lane = tl.arange(0, lanes)
        token = request * query_len + lane
        is_new = (lane < query_len) & (token < num_slots) & (length > 0)
        slot = tl.load(slots + token, mask=is_new, other=0).to(tl.int64)
        if is_translated:
            slot = tl.load(translation + slot, mask=is_new, other=0).to(tl.int64)
        tl.store(slot_mapping + token, tl.where(is_new, slot, no_slot), mask=lane < query_len)
        is_null = (length == 0) & (lane < query_len) & (lane < columns)
        tl.store(block_table + request * of_request + lane, null_block, mask=is_null)
    first_slots = slot_table + tl.load(rows + request).to(tl.int64) * of_row
    count = tl.minimum((length + (block_size - 1)) // block_size, columns)
    start = part * tile
    while start < count:
        column = start + tl.arange(0, tile)
        used = column < count
        found = tl.load(first_slots + column * block_size, mask=used, other=0).to(tl.int64)
        if is_translated:
            found = tl.load(translation + found, mask=used, other=0).to(tl.int64)
        tl.store(block_table + request * of_request + column, (found // block_size).to(tl.int32), mask=used)
        start += parts * tile


_from_slots = Kernel(_write_from_slots)
