"""Pages in compressed rows (CSR), the form in which several kernel libraries take a block table."""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from attnplug.batching.padding import NULL_BLOCK, pad_rows
from attnplug.contract.inputs.upload import upload
from attnplug.errors import BatchError
from attnplug.ops.triton import triton_function

if TYPE_CHECKING:
    from attnplug.contract.inputs.batch import Batch


@frozen(eq=False)
class Pages:
    """
    The pages that each request uses, one request after another.

    Libraries plan with the CPU tensors. The device copies of two of them are made on first access: access them before a
    capture.

    Attributes:
        indices: ``(indptr[-1],)`` int32 physical blocks.
        indptr_cpu: CPU copy of `indptr`.
        last_page_len_cpu: CPU copy of `last_page_len`.
    """

    indices: Tensor
    indptr_cpu: Tensor
    last_page_len_cpu: Tensor

    @cached_property
    def indptr(self) -> Tensor:
        """``(num_reqs + 1,)`` int32 exclusive cumulative sum of the page counts."""
        return upload(self.indptr_cpu, self.indices.device)

    @cached_property
    def last_page_len(self) -> Tensor:
        """``(num_reqs,)`` int32 used slots of the last page, in ``[1, block_size]``; 0 for a request without keys."""
        return upload(self.last_page_len_cpu, self.indices.device)


def pages_of(batch: Batch, block_size: int) -> Pages:
    """
    Return the pages of a paged batch with exact CPU sequence lengths. Computed once per batch.

    Where Triton works, it is one launch on a GPU, and nothing is uploaded. The device is never waited for.

    Raises:
        BatchError: The batch has no pages, no CPU sequence lengths, or a block table with too few columns.
    """
    return batch.cached(("pages", block_size), lambda: _pages_of(batch, block_size))


def pad_pages(pages: Pages, num_reqs: int, num_indices: int | None = None) -> Pages:
    """
    Return the pages with padded requests at their end, for a captured graph.

    A padded request has no pages: it starts and ends where the last request ends, and its last page has no used slots.

    Args:
        pages: The pages; not changed.
        num_reqs: Requests after padding.
        num_indices: Entries of `indices` after padding, the null block in the new ones; None leaves them.

    Raises:
        BatchError: There are more requests or pages than that.
    """
    added = num_reqs - pages.last_page_len_cpu.shape[0]
    indices = pages.indices if num_indices is None else pad_rows(pages.indices, num_indices, NULL_BLOCK)
    last = pad_rows(pages.last_page_len_cpu, num_reqs, 0)
    return Pages(indices, torch.cat([pages.indptr_cpu, pages.indptr_cpu[-1:].expand(added)]), last)


def _pages_of(batch: Batch, block_size: int) -> Pages:
    table, lengths = batch.block_table, batch.seq_lens_cpu
    if table is None or lengths is None:
        raise BatchError(
            f"the batch has block_table={'absent' if table is None else 'present'} and "
            f"seq_lens_cpu={'absent' if lengths is None else 'present'}",
            "pages are counted from exact CPU sequence lengths and read from the block table",
            "pass both, or use the dense block table with lengths on the device",
        )
    indptr, last, num_pages, most = _counts(lengths, block_size)
    if most > table.shape[1]:
        longest = int(lengths.argmax())
        raise BatchError(
            f"request {longest} has {int(lengths[longest])} keys, {most} pages",
            f"the block table has {table.shape[1]} columns of {block_size} slots",
            "allocate the request's blocks before its step",
        )
    pack = triton_function("attnplug.batching.triton_pages", "pack") if table.is_cuda else None
    seq_lens = batch.seq_lens
    if pack is not None and seq_lens.device == table.device and seq_lens.is_contiguous():
        return Pages(pack(table, seq_lens, block_size, num_pages, most), indptr, last)
    return Pages(_indices(table, upload(indptr, table.device), num_pages), indptr, last)


def _counts(lengths: Tensor, block_size: int) -> tuple[Tensor, Tensor, int, int]:
    """Return `indptr`, `last_page_len`, the pages of all requests, and those of the longest."""
    lengths, numbers = lengths.int(), _numbers(block_size)
    if type(numbers[0]) is not Tensor:  # under FakeTensorMode: fake tensors are not kept
        _numbers.cache_clear()
    size, rest, one, zero = numbers
    counts = torch.floor_divide(lengths + rest, size)
    indptr = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    most = int(counts.amax())
    last = torch.sub(lengths, torch.maximum(counts - one, zero), alpha=block_size)
    return indptr, last, int(indptr[-1]), most


@cache
def _numbers(block_size: int) -> tuple[Tensor, ...]:
    """Return a block size, one less, 1 and 0 as tensors: a Python number would be converted in each operation."""
    return tuple(torch.tensor(number, dtype=torch.int32, device="cpu") for number in (block_size, block_size - 1, 1, 0))


def _indices(table: Tensor, indptr: Tensor, num_pages: int) -> Tensor:
    entries = torch.arange(num_pages, dtype=torch.int32, device=table.device)
    requests = torch.searchsorted(indptr[1:], entries, right=True)
    return table[requests, entries - indptr[requests]].to(torch.int32)
