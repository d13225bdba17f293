"""Plans the kernel calls of each step: the kernels take one query length per call."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from attrs import frozen

from attnplug.contract import Metadata, MetadataBuilder
from attnplug_flashmla.kernels import Call, SparseCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from attnplug.contract import AttentionImpl, Batch, BatchSplit, GraphBuffers, State
    from attnplug_flashmla.backend import FlashMLABackend

PIECE: Final = 32
"""
Rows of the pieces of a longer query. With 128 heads they are 64 tiles of 64 rows.

The FP8 kernels take no more tiles than multiprocessors, and mask the last 65 keys of a request alone.
"""

MOST_ROWS: Final = 1 << 16
"""Rows times heads of a call: the library allocates a float32 partial output of 2 KiB for each, 128 MiB."""

_MOST_REQUESTS: Final = (1 << 12) - 1
"""Requests of a call: the kernels that schedule them have shared memory for 4,095 (FP8), or for three times as many."""


@frozen(eq=False, kw_only=True)
class FlashMLAMetadata(Metadata):
    """
    A step.

    Attributes:
        calls: The calls, one after another in the order of their rows.
        sparse: Those of layers that attend to selected tokens, in place of `calls`.
    """

    calls: tuple[Call, ...] = ()
    sparse: tuple[SparseCall, ...] = ()


@frozen
class Span:
    """
    The rows of a call.

    Attributes:
        first_req: The first request.
        count: Requests, or pieces of the first request.
        first_row: The first query row.
        query_len: Rows of each.
        behind: Rows of the request behind its first piece; None for whole requests.
    """

    first_req: int
    count: int
    first_row: int
    query_len: int
    behind: int | None = None


def spans_of(query_lens: Sequence[int], heads: int, longest: int) -> Iterator[Span]:
    """
    Yield the calls of a step: neighbors of one query length, and pieces of each longer query. Padding has no rows.

    Args:
        query_lens: Rows of each request.
        heads: Query heads.
        longest: The longest query that is not cut.
    """
    req = row = 0
    for length, members in groupby(query_lens):
        end = req + len(list(members))
        while req < end:
            if length <= longest:
                count = min(end - req, _most(length, heads))
                if length:
                    yield Span(req, count, row, length)
            else:
                yield from _pieces(req, row, length, heads)
                count = 1
            req, row = req + count, row + count * length


def _pieces(req: int, row: int, length: int, heads: int) -> Iterator[Span]:
    """Yield the calls of one long query; the last has the rows that fill no piece."""
    while length:
        size = min(length, PIECE)
        count = min(length // size, _most(size, heads))
        yield Span(req, count, row, size, length - size)
        row, length = row + count * size, length - count * size


def _most(length: int, heads: int) -> int:
    return max(1, min(MOST_ROWS // (max(1, length) * heads), _MOST_REQUESTS))


class FlashMLABuilder(MetadataBuilder):
    """
    Makes the calls of a step, with the library's schedules, which all layers share.

    Schedules are computed on the device from the lengths there. A graph computes its own.
    """

    supports_graphs = True
    backend: FlashMLABackend

    def __init__(self, backend: FlashMLABackend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        required = self.agreement.requirements
        self._kernels = backend.kernels
        self._heads = required.num_q_heads
        self._longest = max(PIECE, required.decode_query_len)
        self._is_sparse = required.topk is not None

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return the calls. In a graph all requests have the query length of its shape."""
        del split, fast
        if self._is_sparse:
            if graph is None:
                return {"sparse": self._sparse_calls(batch.num_actual_tokens, self._kernels.sparse_call)}
            make = partial(self._sparse_calls, graph.key.num_tokens, self._kernels.graph_call)
            return {"sparse": self.per_graph(graph, "sparse", make)}
        if graph is None:
            query_lens = cast("Tensor", batch.query_start_loc_cpu).diff().tolist()
        else:
            query_lens = [graph.key.num_tokens // graph.key.num_reqs] * graph.key.num_reqs
        spans = spans_of(query_lens, self._heads, self._longest)
        return {"calls": tuple([self._call(batch, span, graph) for span in spans])}

    def prepare_in_graph(self, metadata: Metadata) -> None:
        """Write the schedules again, for the lengths on the device; those of sparse calls stay as they are."""
        for call in cast("FlashMLAMetadata", metadata).calls:
            if call.padding is not None:
                self._write_padded(metadata.batch, call, call.padding)
            schedule, splits = self._kernels.schedule(call.lens, call.query_len)
            call.schedule.copy_(schedule)
            call.splits.copy_(splits)

    @property
    def replays_without_build(self) -> bool:
        """Schedules are made of the lengths on the device alone."""
        return True

    def _sparse_calls(self, tokens: int, make: Callable[[int, int], SparseCall]) -> tuple[SparseCall, ...]:
        """Return the calls for query tokens. Each is a request of the decode kernel, which has a bounded memory."""
        most = _most(1, self._kernels.sparse_heads) if self._kernels.has_records else max(1, tokens)
        return tuple([make(first, min(first + most, tokens)) for first in range(0, tokens, most)])

    def _call(self, batch: Batch, span: Span, graph: GraphBuffers | None) -> Call:
        requests = slice(span.first_req, span.first_req + (span.count if span.behind is None else 1))
        lens, table = batch.seq_lens[requests], cast("Tensor", batch.block_table)[requests]
        if span.behind is not None:
            table, lens = table.expand(span.count, -1), lens.expand(span.count)
            if batch.causal:
                end, step = span.behind - span.count * span.query_len, -span.query_len
                lens = lens - torch.arange(span.behind, end, step, dtype=lens.dtype, device=lens.device)
        lens, padding, last = lens.contiguous(), None, span.first_row + span.count * span.query_len
        if graph is None:
            schedule, splits = self._kernels.schedule(lens, span.query_len)
        else:
            if self._kernels.is_fp8:
                lens, table, padding = self.per_graph(
                    graph, ("padded", span.first_row), lambda: _padded(lens, table, span.query_len)
                )
            schedule, splits = self.per_graph(
                graph, span.first_row, lambda: self._kernels.schedule(lens, span.query_len)
            )
        return Call(span.first_row, last, span.query_len, lens, table, batch.causal, schedule, splits, padding)

    @staticmethod
    def _write_padded(batch: Batch, call: Call, padding: Tensor) -> None:
        """Write lengths and pages with a key for each request, and which rows belong to requests without one."""
        requests = slice(call.first // call.query_len, call.last // call.query_len)
        lens, table = batch.seq_lens[requests], cast("Tensor", batch.block_table)[requests]
        is_empty = (lens == 0)[:, None]
        call.lens.copy_(lens.clamp(min=1))
        call.table.copy_(table.masked_fill(is_empty, 0))
        padding.view(-1, call.query_len).copy_(is_empty)


def _padded(lens: Tensor, table: Tensor, query_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for lengths, pages and padding of a graph, as of requests with one key of the null block."""
    padding = torch.ones(lens.shape[0] * query_len, 1, dtype=torch.bool, device=lens.device)
    return torch.ones_like(lens), torch.zeros_like(table, memory_format=torch.contiguous_format), padding
