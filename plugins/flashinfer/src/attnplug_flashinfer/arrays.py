"""The arrays that the library's plans take, made once per batch for all plan keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from attnplug.batching import pad_rows, pages_of, shared_prefix_blocks
from attnplug.contract import upload
from attnplug_flashinfer.routes import prefix_kind

if TYPE_CHECKING:
    from attnplug.batching import Pages
    from attnplug.contract import Batch
    from attnplug_flashinfer.routes import Route


@frozen(eq=False)
class Buffers:
    """
    The arrays that the kernels of a captured graph read, all int32 on the device.

    Attributes:
        starts: ``(num_reqs + 1,)`` the first row of each request (the library's ``qo_indptr``).
        counts: ``(2 * num_reqs + 1,)`` the memory of `indptr` and `last_page_len`, which one upload fills.
        indices: The pages of all requests: memory for the longest sequences, or more.
        indptr: ``(num_reqs + 1,)`` the first page of each request.
        last_page_len: ``(num_reqs,)`` the keys in each last page; over latents, in each request.
    """

    starts: Tensor
    counts: Tensor
    indices: Tensor
    indptr: Tensor = field(init=False)
    last_page_len: Tensor = field(init=False)

    @indptr.default
    def _front(self) -> Tensor:
        return self.counts[: self.starts.shape[0]]

    @last_page_len.default
    def _back(self) -> Tensor:
        return self.counts[self.starts.shape[0] :]

    def write(self, rows: Rows) -> None:
        """Write the pages of a step, in stream order."""
        upload(torch.cat((rows.indptr, rows.last_page_len)), self.counts.device, out=self.counts)
        self.indices[: rows.indices.shape[0]].copy_(rows.indices)


@frozen(eq=False)
class Rows:
    """
    Requests with consecutive query rows, as arguments of a plan: CPU tensors, except for the pages.

    Attributes:
        kind: The kind of wrapper that plans them, by a name of `attnplug_flashinfer.kinds`.
        first: The first query row.
        last: The row behind the last one.
        longest: The rows of the longest query.
        causal: Whether a causal mask applies.
        starts: ``(requests + 1,)`` int32, the first row of each request, from 0.
        indptr: ``(requests + 1,)`` int32, the first page of each request, from 0; in dense calls, the first key.
        indices: ``(pages,)`` int32 on the device; empty in dense calls.
        last_page_len: ``(requests,)`` int32, the keys in each last page; empty in dense calls.
    """

    kind: str
    first: int
    last: int
    longest: int
    causal: bool
    starts: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@frozen(eq=False)
class Step:
    """
    The rows of a step.

    Attributes:
        parts: All rows, each in one part.
        prefix: The same rows over the shared prefix. The parts then have the keys behind it.
    """

    parts: tuple[Rows, ...]
    prefix: Rows | None = None


def rows_of_step(batch: Batch, block_size: int, routes: tuple[Route, ...]) -> Step:
    """
    Return the rows of a paged step.

    Args:
        batch: A checked batch.
        block_size: Slots per page.
        routes: The routes of requests, in their order. The last one accepts every request.
    """
    if not batch.common_prefix_len:
        return Step(_split(batch, pages_of(batch, block_size), routes))
    shared = batch.common_prefix_len // block_size
    parts = _split(batch, _suffix_pages(batch, block_size, shared), routes)
    return Step(parts, _prefix(batch, shared, block_size, prefix_kind(parts[-1].kind, routes)))


def rows_of_dense(batch: Batch) -> Step:
    """Return the rows of a dense step, all of the kind ``"ragged"``."""
    starts, keys, tokens = _on_cpu(batch.query_start_loc_cpu), _on_cpu(batch.key_start_loc_cpu), batch.num_actual_tokens
    empty = starts[:0]
    return Step((Rows("ragged", 0, tokens, batch.max_query_len, batch.causal, starts, keys, empty, empty),))


def rows_of_graph(batch: Batch, block_size: int, kind: str, starts: Tensor) -> Rows:
    """
    Return the rows of a batch that is padded to a captured shape.

    A padded request has rows and no key: the kernels write 0 there, and -50,000 as the LSE (an H200, 0.6.12).

    Args:
        batch: The batch as the graph sees it: its requests have equally many rows, and padding comes last.
        block_size: Slots per page.
        kind: The kind of wrapper.
        starts: ``(num_reqs + 1,)`` the first row of each request of the captured shape.
    """
    pages, query_len = pages_of(batch, block_size), batch.max_query_len
    num_reqs = int(_on_cpu(batch.query_start_loc_cpu)[-1]) // query_len  # without padding
    indptr, last, indices = pages.indptr_cpu, pages.last_page_len_cpu, pages.indices
    if num_reqs < batch.num_reqs:
        used = int(indptr[num_reqs])
        indptr = pad_rows(indptr[: num_reqs + 1], batch.num_reqs + 1, used)
        last = pad_rows(last[:num_reqs], batch.num_reqs, 0)
        indices = indices[:used]
    return Rows(kind, 0, batch.num_actual_tokens, query_len, batch.causal, starts, indptr, indices, last)


def without_empty(rows: Rows) -> Rows:
    """Return rows without the requests that have none."""
    kept = rows.starts.diff() > 0
    if bool(kept.all()):
        return rows
    pages = rows.indptr.diff()
    used = kept.repeat_interleave(pages).nonzero().squeeze(1)
    first = torch.zeros(1, dtype=torch.int32)
    return evolve(
        rows,
        starts=torch.cat((first, rows.starts[1:][kept])),
        indptr=torch.cat((first, pages[kept].cumsum(0, dtype=torch.int32))),
        indices=rows.indices[upload(used, rows.indices.device)],
        last_page_len=rows.last_page_len[kept],
    )


def _split(batch: Batch, pages: Pages, routes: tuple[Route, ...]) -> tuple[Rows, ...]:
    starts = _on_cpu(batch.query_start_loc_cpu)
    if batch.num_actual_tokens == batch.num_reqs and batch.max_query_len == 1:  # the common step, without a loop
        kind = next(route.kind for route in routes if route.accepts(1))
        return (_part(kind, batch, starts, pages, 0, batch.num_reqs, 1),)
    lens: list[int] = starts.diff().tolist()
    first, parts = 0, []
    for route in routes:
        last = next((index for index in range(first, len(lens)) if not route.accepts(lens[index])), len(lens))
        longest = max(lens[first:last], default=0)
        if longest:  # padded requests alone have no rows to plan
            parts.append(_part(route.kind, batch, starts, pages, first, last, longest))
            first = last
    return tuple(parts)


def _part(kind: str, batch: Batch, starts: Tensor, pages: Pages, first: int, last: int, longest: int) -> Rows:
    """Return the requests from `first` to before `last`, with rows and pages counted from 0."""
    if last - first == batch.num_reqs:
        tokens, arrays = batch.num_actual_tokens, (pages.indptr_cpu, pages.indices, pages.last_page_len_cpu)
        return Rows(kind, 0, tokens, longest, batch.causal, starts, *arrays)
    indptr, indices, used = pages.indptr_cpu[first : last + 1], pages.indices, pages.last_page_len_cpu[first:last]
    starts = starts[first : last + 1]
    begin, end = int(starts[0]), int(starts[-1])
    if first:
        indices = indices[int(indptr[0]) :]
        starts, indptr = starts - begin, indptr - indptr[0]
    return Rows(kind, begin, end, longest, batch.causal, starts, indptr, indices, used)


def _prefix(batch: Batch, shared: int, block_size: int, kind: str) -> Rows:
    """Return one request with all rows, and with the pages that all requests share."""
    tokens, blocks = batch.num_actual_tokens, shared_prefix_blocks(batch, block_size)
    starts, indptr, last = (
        torch.tensor(values, dtype=torch.int32) for values in ([0, tokens], [0, shared], [block_size])
    )
    return Rows(kind, 0, tokens, tokens, False, starts, indptr, blocks[0], last)  # noqa: FBT003 - see Rows


def _suffix_pages(batch: Batch, block_size: int, shared: int) -> Pages:
    """Return the pages behind the shared ones. Padded requests may be shorter than those."""
    table, lens = batch.block_table, _on_cpu(batch.seq_lens_cpu)
    assert table is not None  # noqa: S101 - the contract checks that paged batches have one
    table_cpu = batch.block_table_cpu
    suffix = evolve(
        batch,
        block_table=table[:, shared:],
        block_table_cpu=None if table_cpu is None else table_cpu[:, shared:],
        seq_lens=(batch.seq_lens - shared * block_size).clamp_(min=0),
        seq_lens_cpu=(lens - shared * block_size).clamp_(min=0),
    )
    return pages_of(suffix, block_size)


def _on_cpu(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101 - the contract requires exact CPU sequence lengths for this backend
    return tensor
