"""Pages in compressed rows, the form in which several kernel libraries take a block table."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from attnplug.batching.padding import NULL_BLOCK, pad_rows
from attnplug.contract.staging import upload
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from attnplug.contract.batch import Batch


@frozen(eq=False)
class Pages:
    """
    The pages that each request uses, one request after another.

    Attributes:
        indptr: ``(num_reqs + 1,)`` int32 exclusive cumulative sum of the page counts.
        indices: ``(indptr[-1],)`` int32 physical blocks.
        last_page_len: ``(num_reqs,)`` int32 used slots of each request's last page, in ``[1, block_size]``; 0 for a
            request without keys.
        indptr_cpu: Host copy of `indptr`.
        last_page_len_cpu: Host copy of `last_page_len`.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    indptr_cpu: Tensor
    last_page_len_cpu: Tensor


def pages_of(batch: Batch, block_size: int) -> Pages:
    """
    Return the pages of a paged batch with exact host lengths. Computed once per batch and shared by whoever asks.

    Raises:
        BatchError: The batch has no pages, no host lengths, or a block table with too few columns.
    """
    return batch.once(("pages", block_size), lambda: _pages_of(batch, block_size))


def pad_pages(pages: Pages, num_reqs: int, num_indices: int | None = None) -> Pages:
    """
    Return the pages with padded requests at their end, as a captured graph needs them.

    A padded request has no pages: it starts and ends where the last one ends, and its last page has no used slots.

    Args:
        pages: The pages; not changed.
        num_reqs: Requests after padding.
        num_indices: Entries of `indices` after padding, the null block in the new ones; None leaves them.

    Raises:
        BatchError: There are more requests or pages than that.
    """
    added = num_reqs - pages.last_page_len.shape[0]
    indices = pages.indices if num_indices is None else pad_rows(pages.indices, num_indices, NULL_BLOCK)
    last, last_cpu = (pad_rows(each, num_reqs, 0) for each in (pages.last_page_len, pages.last_page_len_cpu))
    indptr, indptr_cpu = (torch.cat([each, each[-1:].expand(added)]) for each in (pages.indptr, pages.indptr_cpu))
    return Pages(indptr, indices, last, indptr_cpu, last_cpu)


def _pages_of(batch: Batch, block_size: int) -> Pages:
    table, lengths = batch.block_table, batch.seq_lens_cpu
    if table is None or lengths is None:
        raise BatchError(
            f"the batch has block_table={'absent' if table is None else 'present'} and "
            f"seq_lens_cpu={'absent' if lengths is None else 'present'}",
            "pages are counted from exact host lengths and read from the block table",
            "give both, or use the dense block table with lengths on the device",
        )
    seq_lens = lengths.tolist()
    counts = [-(-length // block_size) for length in seq_lens]
    if max(counts, default=0) > table.shape[1]:
        raise BatchError(
            f"request {counts.index(max(counts))} has {max(seq_lens)} keys, {max(counts)} pages",
            f"the block table has {table.shape[1]} columns of {block_size} slots",
            "allocate the request's blocks before its step",
        )
    indptr_cpu = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    last_cpu = torch.tensor([(length - 1) % block_size + 1 if length else 0 for length in seq_lens], dtype=torch.int32)
    indptr = upload(indptr_cpu, table.device)
    entries = torch.arange(sum(counts), dtype=torch.int32, device=table.device)
    requests = torch.searchsorted(indptr[1:], entries, right=True)
    indices = table[requests, entries - indptr[requests]].to(torch.int32)
    return Pages(indptr, indices, upload(last_cpu, table.device), indptr_cpu, last_cpu)
