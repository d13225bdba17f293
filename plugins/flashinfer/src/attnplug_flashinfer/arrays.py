"""The arrays that a step gives the library to plan: made once per batch, whoever plans with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.batching import NULL_BLOCK, pad_rows, pages_of
from attnplug.contract import upload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.batching import Pages
    from attnplug.contract import Batch


@frozen(eq=False)
class Buffers:
    """
    What the kernels of a captured graph read, all int32 on the device.

    Attributes:
        starts: ``(num_reqs + 1,)`` where each request's rows start.
        indptr: ``(num_reqs + 1,)`` where each request's pages start.
        indices: Pages, as many as the longest sequences take, or more.
        last_page_len: ``(num_reqs,)`` keys in each last page.
    """

    starts: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    def write(self, rows: Rows) -> None:
        """Take the pages of a step, in stream order."""
        device = self.indptr.device
        upload(rows.indptr, device, out=self.indptr)
        upload(rows.last_page_len, device, out=self.last_page_len)
        self.indices[: rows.indices.shape[0]].copy_(rows.indices)


@frozen(eq=False)
class Rows:
    """
    Requests whose query rows lie together, in the form of a plan: host tensors but for the pages.

    Attributes:
        first: Their first query row.
        last: The row behind their last one.
        longest: Rows of the longest query.
        causal: Whether a row attends no later key.
        starts: ``(requests + 1,)`` int32, rows from 0.
        indptr: ``(requests + 1,)`` int32, pages from 0; of dense calls, keys.
        indices: ``(pages,)`` int32 on the device; of dense calls, empty.
        last_page_len: ``(requests,)`` int32 keys in each last page; of dense calls, empty.
    """

    first: int
    last: int
    longest: int
    causal: bool
    starts: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def rows_of_step(batch: Batch, block_size: int, *, apart: bool) -> Mapping[str, Rows]:
    """
    Return the rows of a paged step by what plans them: ``"decode"``, ``"prefill"``, and ``"prefix"`` for a shared one.

    Args:
        batch: A checked batch.
        block_size: Slots per page.
        apart: Whether requests of one row at the front are decodes; otherwise all rows are one prefill.
    """
    if not batch.common_prefix_len:
        return _split(batch, pages_of(batch, block_size), apart=apart)
    shared = batch.common_prefix_len // block_size
    return {
        **_split(batch, _own_pages(batch, block_size, shared), apart=apart),
        "prefix": _prefix(batch, shared, block_size),
    }


def rows_of_dense(batch: Batch) -> Mapping[str, Rows]:
    """Return the rows of a dense step, all of them ``"ragged"``."""
    starts, keys = _host(batch.query_start_loc_cpu), _host(batch.key_start_loc_cpu)
    none = starts[:0]
    tokens = batch.num_actual_tokens
    return {"ragged": Rows(0, tokens, batch.max_query_len, batch.causal, starts, keys, none, none)}


def rows_of_slot(batch: Batch, block_size: int, starts: Tensor) -> Rows:
    """
    Return the rows of a batch that was padded to a captured shape.

    Every padded request reads as many keys as it has rows, in the null block: kernels expect some, and nobody looks at
    what comes of it.

    Args:
        batch: The batch as the graph sees it: its requests have equally many rows, and padding stands last.
        block_size: Slots per page.
        starts: ``(num_reqs + 1,)`` where the rows of the captured shape start.
    """
    pages, query_len = pages_of(batch, block_size), batch.max_query_len
    real = int(_host(batch.query_start_loc_cpu)[-1]) // query_len
    indptr, last, indices = pages.indptr_cpu, pages.last_page_len_cpu, pages.indices
    if real < batch.num_reqs:
        each = -(-query_len // block_size)
        used, padded = int(indptr[real]), batch.num_reqs - real
        added = torch.arange(used + each, used + padded * each + 1, each, dtype=torch.int32)
        indptr = torch.cat((indptr[: real + 1], added))
        last = pad_rows(last[:real], batch.num_reqs, (query_len - 1) % block_size + 1)
        indices = pad_rows(indices[:used], used + padded * each, NULL_BLOCK)
    return Rows(0, batch.num_actual_tokens, query_len, batch.causal, starts, indptr, indices, last)


def _split(batch: Batch, pages: Pages, *, apart: bool) -> dict[str, Rows]:
    starts, tokens, found = _host(batch.query_start_loc_cpu), batch.num_actual_tokens, {}
    ones = _leading_ones(batch, starts) if apart else 0
    if ones:
        indptr, last = pages.indptr_cpu[: ones + 1], pages.last_page_len_cpu[:ones]
        found["decode"] = Rows(0, ones, 1, batch.causal, starts[: ones + 1], indptr, pages.indices, last)
    if ones < tokens:
        indptr, indices, last = pages.indptr_cpu, pages.indices, pages.last_page_len_cpu
        if ones:
            used = int(indptr[ones])
            starts, indptr, indices, last = starts[ones:] - ones, indptr[ones:] - used, indices[used:], last[ones:]
        found["prefill"] = Rows(ones, tokens, batch.max_query_len, batch.causal, starts, indptr, indices, last)
    return found


def _leading_ones(batch: Batch, starts: Tensor) -> int:
    """Return how many requests at the front have one row. Padded ones may stand anywhere, with none."""
    if batch.num_actual_tokens == batch.num_reqs and batch.max_query_len == 1:
        return batch.num_reqs
    places: list[int] = starts.tolist()
    return next((index - 1 for index, place in enumerate(places) if place != index), batch.num_reqs)


def _prefix(batch: Batch, shared: int, block_size: int) -> Rows:
    """One request that has all rows, and the pages that all requests share."""
    tokens, table = batch.num_actual_tokens, batch.block_table
    assert table is not None  # noqa: S101 - the batch is paged, and was checked
    starts, indptr, last = (
        torch.tensor(values, dtype=torch.int32) for values in ([0, tokens], [0, shared], [block_size])
    )
    return Rows(0, tokens, tokens, False, starts, indptr, table[0, :shared], last)  # noqa: FBT003 - see Rows


def _own_pages(batch: Batch, block_size: int, shared: int) -> Pages:
    """Return the pages behind the shared ones. Padded requests may be shorter than those."""
    table, lens = batch.block_table, _host(batch.seq_lens_cpu)
    assert table is not None  # noqa: S101 - see above
    host = batch.block_table_cpu
    own = evolve(
        batch,
        block_table=table[:, shared:],
        block_table_cpu=None if host is None else host[:, shared:],
        seq_lens=(batch.seq_lens - shared * block_size).clamp_(min=0),
        seq_lens_cpu=(lens - shared * block_size).clamp_(min=0),
    )
    return pages_of(own, block_size)


def _host(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101 - the guard has seen it
    return tensor
