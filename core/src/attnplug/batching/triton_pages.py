"""Packs a block table into compressed rows in one launch. Imported only where Triton works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from attnplug.ops.triton import Launch

if TYPE_CHECKING:
    from torch import Tensor

_TILE: Final = 512
"""Pages of a program."""

_LANES: Final = 1024
"""Requests whose pages a program counts at a time, to find the first page of its own request."""

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
