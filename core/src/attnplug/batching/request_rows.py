"""Requests as the arrays that a host holds: vectors of lengths, and rows of its block table."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.batching.step_tensors import as_int32
from attnplug.contract.guards._format import describe
from attnplug.contract.inputs.exact import extremes
from attnplug.errors import BatchError, shown

Vector = Tensor | list[Any]

_DTYPES: Final = (torch.int32, torch.int64)
FEW_REQUESTS = 8
"""Up to so many requests, a loop over lists is faster than tensor operations."""

_END: Final = 2**31
"""The numbers of a batch are int32."""


@frozen(eq=False)
class GivenRequests:
    """
    Requests as a host gives them, as many of each. Elements of lists are not checked.

    Attributes:
        query_lens: New tokens of each.
        computed: Cached tokens of each.
        blocks: ``(num_reqs, columns)`` int32 or int64 on the CPU, or a list of blocks for each.
        num_blocks: Blocks in each row of such a table; None for those that its tokens need.
        write_from: Position of each from which K/V are written; None for 0.
    """

    query_lens: Vector
    computed: Vector
    blocks: Vector
    num_blocks: list[int] | None
    write_from: Vector | None

    @classmethod
    def of(cls, query_lens: Any, computed: Any, blocks: Any, num_blocks: Any, write_from: Any) -> GivenRequests:
        """
        Return what was given to `BatchAssembler.add_many`.

        Raises:
            BatchError: See there.
        """
        if num_blocks is None is write_from and (found := _usual(query_lens, computed, blocks)):
            return found
        given: dict[str, Vector] = {
            "query_lens": _vector("query_lens", query_lens),
            "num_computed_tokens": _vector("num_computed_tokens", computed),
            "blocks": _tensor("blocks", blocks, "requests, columns")
            if _is_array(blocks)
            else _vector("blocks", blocks),
        }
        counts = starts = None
        if num_blocks is not None:
            given["num_blocks"] = counts = [
                whole("num_blocks", one) for one in as_list(_vector("num_blocks", num_blocks))
            ]
        if write_from is not None:
            given["write_from"] = starts = _vector("write_from", write_from)
        queries, cached, table = given["query_lens"], given["num_computed_tokens"], given["blocks"]
        sizes = {name: one.shape[0] if isinstance(one, Tensor) else len(one) for name, one in given.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(
                ", ".join(f"{size} {name}" for name, size in sizes.items()) + " were given",
                "each request has one of each",
                "pass as many of each",
            )
        if counts is not None:
            _check_counts(table, counts)
        return cls(queries, cached, table, counts, starts)

    def one_by_one(self, block_size: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what `BatchAssembler.add` takes of each request: the numbers, and its blocks as a list."""
        queries, cached, blocks, counts = as_list(self.query_lens), as_list(self.computed), self.blocks, self.num_blocks
        if isinstance(blocks, Tensor):
            if counts is None:
                most = blocks.shape[1]
                counts = [min(most, _needed(*lens, block_size)) for lens in zip(queries, cached, strict=True)]
            rows = blocks[:, : max(counts, default=0)].tolist()
            blocks = [row[:count] for row, count in zip(rows, counts, strict=True)]
        return queries, cached, blocks


@frozen(eq=False)
class RequestRows:
    """
    Requests that were checked together.

    Attributes:
        query_lens: ``(num_reqs,)`` int32.
        computed: ``(num_reqs,)`` int32, cached tokens.
        seq_lens: ``(num_reqs,)`` int32, the sum of both.
        blocks: ``(num_reqs, columns)`` int32, 0 behind a request's blocks.
        counts: Blocks of each request; None where all have all columns.
        num_tokens: New tokens.
        max_query_len: The longest query.
        max_seq_len: The longest sequence.
        write_from: Requests whose first new tokens are not written, and the position from which they are.
    """

    query_lens: Tensor
    computed: Tensor
    seq_lens: Tensor
    blocks: Tensor
    counts: Tensor | None
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    write_from: list[tuple[int, int]]


class RowReader:
    """
    Reads requests by tensor operations: about fifteen of them, however many requests there are.

    Args:
        block_size: Slots per block.
        sliding_window: As for `first_attended_key`.
        attention_chunk: Likewise.
    """

    def __init__(self, block_size: int, sliding_window: int | None, attention_chunk: int | None) -> None:
        self._block_size = block_size
        self._window = sliding_window
        self._chunk = attention_chunk
        self._columns = torch.arange(0, dtype=torch.int32, device="cpu")  # 0, 1, 2, ..., kept between steps

    def read(self, given: GivenRequests) -> RequestRows | None:
        """Return the requests, or None where each is read alone: one is invalid, blocks are lists, or they are few."""
        table, size = given.blocks, self._block_size
        if not isinstance(table, Tensor) or table.shape[0] <= FEW_REQUESTS:
            return None
        query_lens, computed = _int32(given.query_lens), _int32(given.computed)
        if query_lens is None or computed is None:
            return None
        (least_query, most_query), (least, most) = extremes(query_lens), extremes(computed)
        if least_query < 1 or least < 0 or most_query + most + size > _END:
            return None
        seq_lens = computed + query_lens
        if least_query == most_query:  # as in nearly every step of decodes
            tokens, shortest, longest = table.shape[0] * most_query, least + most_query, most + most_query
        else:
            tokens, (shortest, longest) = int(query_lens.sum()), extremes(seq_lens)
        fewest, width, counts = -(-shortest // size), -(-longest // size), None
        if fewest < width or given.num_blocks is not None:
            counts = self._counts(given, seq_lens)
            if counts is None:
                return None
            if given.num_blocks is not None:
                fewest, width = extremes(counts)
        blocks = self._blocks(table, width, counts if fewest < width else None, computed)
        skipped = _skipped(given, computed)
        if blocks is None or skipped is None:
            return None
        return RequestRows(query_lens, computed, seq_lens, blocks, counts, tokens, most_query, longest, skipped)

    def _counts(self, given: GivenRequests, seq_lens: Tensor) -> Tensor | None:
        """Return the blocks of each request, int32; None where they are too few."""
        size = self._block_size
        # Nearly all blocks have a power of two of slots, and a division takes much longer than a shift.
        needed = seq_lens + (size - 1)
        needed = needed >> size.bit_length() - 1 if size & (size - 1) == 0 else needed // size
        if given.num_blocks is None:
            return needed
        counts = torch.tensor(given.num_blocks, dtype=torch.int32, device="cpu")
        return counts if bool((counts >= needed).all()) else None

    def _blocks(self, table: Tensor, width: int, counts: Tensor | None, computed: Tensor) -> Tensor | None:
        """Return a copy of the blocks; None where one is invalid, or freed and perhaps attended to."""
        if width > table.shape[1]:
            return None
        if width < table.shape[1]:
            table = table[:, :width]
        # A block is at least `least` in `shifted`, a freed one that less 1.
        entries = shifted = table
        least = 1
        if counts is not None:  # requests differ; arithmetic costs a fifth of masks
            if self._columns.shape[0] != width:
                self._columns = torch.arange(width, dtype=torch.int32, device="cpu")
            used = (counts.unsqueeze(1) - self._columns).clamp_(0, 1)
            entries = table * used
            shifted, least = entries - used, 0
        low, high = extremes(shifted)
        if (
            low < least - 1
            or high >= _END - 1 + least
            or (low < least and not self._are_freed(shifted - least, computed))
        ):
            return None
        return entries.to(torch.int32, memory_format=torch.contiguous_format, copy=entries is table)

    def _are_freed(self, shifted: Tensor, computed: Tensor) -> bool:
        """Whether -1 is at blocks alone that no query attends to, see `num_freeable_blocks`."""
        first = torch.zeros_like(computed)
        if self._window is not None:
            first = (computed - (self._window - 1)).clamp_(min=0)
        if self._chunk is not None:
            first = torch.maximum(first, computed - computed % self._chunk)
        columns = torch.arange(shifted.shape[1], dtype=torch.int32, device="cpu")
        freeable = ((first // self._block_size).unsqueeze(1) - columns).clamp_(0, 1)
        return int((shifted + freeable).amin()) >= 0


def whole(name: str, number: Any) -> int:
    """
    Return an integer of numpy or torch as one of Python.

    Raises:
        BatchError: It is something else.
    """
    try:
        return int(index(number))
    except TypeError:
        raise BatchError(f"{name}={number!r} was given", f"{name} is an integer", "pass an int") from None


def _is_array(given: object) -> bool:
    return isinstance(given, Tensor) or hasattr(given, "__array__")


def _tensor(name: str, given: Any, axes: str) -> Tensor:
    """Return a host's array as a tensor of the same memory."""
    tensor = given if isinstance(given, Tensor) else None
    if tensor is None:
        with suppress(AttributeError, TypeError, ValueError):  # not of numpy, or of a form that torch does not have
            # Torch warns of memory that may not be written; here it is read.
            tensor = torch.from_numpy(given if given.flags.writeable else given.copy())
    if tensor is None or not tensor.is_cpu or tensor.dtype not in _DTYPES or tensor.ndim != axes.count(",") + 1:
        raise BatchError(
            f"{name}={shown(given) if tensor is None else describe(tensor)} was given",
            f"an array of {name} is ({axes}) int32 or int64, on the CPU",
            "pass such an array, or a list",
        )
    return tensor


def as_list(vector: Vector) -> list[Any]:
    """Return what each request has as a list."""
    if isinstance(vector, Tensor):
        found: list[Any] = vector.tolist()
        return found
    return vector


def _usual(query_lens: Any, computed: Any, blocks: Any) -> GivenRequests | None:
    """Return requests that are given as tensors of the expected form; None for all others, which are looked into."""
    if not (isinstance(query_lens, Tensor) and isinstance(computed, Tensor) and isinstance(blocks, Tensor)):
        return None
    is_usual = (
        query_lens.dtype in _DTYPES
        and computed.dtype in _DTYPES
        and blocks.dtype in _DTYPES
        and query_lens.is_cpu
        and computed.is_cpu
        and blocks.is_cpu
        and blocks.ndim == 2
        and query_lens.shape == computed.shape == blocks.shape[:1]
    )
    return GivenRequests(query_lens, computed, blocks, None, None) if is_usual else None


def _vector(name: str, given: Any) -> Vector:
    """Return what each request has, as it was given."""
    if type(given) is list:
        return given
    if _is_array(given):
        return _tensor(name, given, "requests")
    try:
        return list(given)
    except TypeError:
        raise BatchError(
            f"{name}={shown(given)} was given", f"{name} has an entry per request", "pass a list"
        ) from None


def _check_counts(blocks: Vector, counts: list[int]) -> None:
    if not isinstance(blocks, Tensor):
        raise BatchError(
            "num_blocks was given with a list of blocks for each request",
            "num_blocks counts the blocks in a row of a block table; a list has a length",
            "leave num_blocks out",
        )
    for row, count in enumerate(counts):
        if not 0 <= count <= blocks.shape[1]:
            raise BatchError(
                f"request {row} was given with num_blocks={count}",
                f"a row of the block table has {blocks.shape[1]} columns",
                "pass the number of columns that are the request's",
            )


def _int32(numbers: Vector) -> Tensor | None:
    """Return numbers as a new tensor; None where one is not an integer, or too large."""
    if isinstance(numbers, Tensor):
        low, high = (0, 0) if numbers.dtype == torch.int32 else extremes(numbers)
        return numbers.to(torch.int32, copy=True) if low >= -_END and high < _END else None
    try:
        return as_int32(numbers)
    except (TypeError, OverflowError):
        return None


def _skipped(given: GivenRequests, computed: Tensor) -> list[tuple[int, int]] | None:
    """Return the requests whose first new tokens are not written; None where a position is invalid."""
    if given.write_from is None:
        return []
    starts = _int32(given.write_from)
    if starts is None or int(starts.amin()) < 0:
        return None
    return [(row, int(starts[row])) for row in (starts > computed).nonzero().flatten().tolist()]


def _needed(query_len: Any, computed: Any, block_size: int) -> int:
    """Return the blocks that a request needs; 0 for invalid numbers."""
    try:
        return max(0, -(-(index(query_len) + index(computed)) // block_size))
    except TypeError:
        return 0
