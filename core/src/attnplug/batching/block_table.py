"""A block table that is written row by row and kept from step to step."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.batching.window import fewest_computed_tokens
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_NO_ROW: Final[tuple[list[int | None], int, int]] = ([], 0, -1)
"""Of a row that was not written: it has room for no request."""

_ARRAY_ROW: Final[tuple[list[Any], int, int]] = ([object()], 0, -1)
"""Of a row that was written from a host's table: no list of blocks is equal to this one."""

_FIRST_ROWS, _FIRST_COLUMNS = 16, 16
_HINTS_PER_ROW = 8


class BlockTable:
    """
    Rows of physical blocks in one growing buffer, written from the first on in each step.

    Most requests have the same blocks as in the step before, or one more: a row is compared, and only what is new in it
    is converted. An `array.array` is filled faster than a tensor; `to_tensor` returns copies, which later steps do not
    change.

    Args:
        block_size: Slots per block.
        window: `sliding_window` and `attention_chunk`, as for `num_freeable_blocks`.

    Attributes:
        rows: For each row, and for the next one, its blocks as they were given, and the tokens that they are enough
            for: the fewest computed ones, as no block behind the freed ones is attended to, and the most in all. The
            lists are copies.
    """

    def __init__(self, block_size: int, **window: int | None) -> None:
        self._block_size = block_size
        self._window = window
        self.rows: list[tuple[list[int | None], int, int]] = [_NO_ROW]
        self._counts: list[int] = []
        self._holes: list[int] = []
        self._row_of: dict[int, int] = {}
        self._cells = array("i", bytes(4 * _FIRST_ROWS * _FIRST_COLUMNS))
        self._tensor = _view(self._cells, _FIRST_COLUMNS)

    @property
    def tensor(self) -> Tensor:
        """``(rows, columns)`` int32, the buffer itself: valid until a row is written, 0 after a row's blocks."""
        return self._tensor

    def set_row(self, row: int, blocks: Sequence[int | None]) -> tuple[int, int]:
        """
        Write the blocks of one request into a row: an existing one, or the next.

        Args:
            row: The row. Later ones are of steps before: their order may change.
            blocks: Physical blocks, None or 0 for a freed one.

        Returns:
            The number of blocks without freed ones at the end, and the number of leading blocks up to the last freed
            one.

        Raises:
            BatchError: A block is negative, or not an integer. The row is not changed.
            TypeError: The blocks are not iterable.
        """
        given = blocks if type(blocks) is list else list(blocks)
        # A host passes one list per request, step after step. When a request before it ends, its row is an earlier one.
        # An id may be that of a list which is garbage-collected by now: it is a hint, and the blocks are compared.
        before = self._row_of.get(id(blocks), row)
        if not (self._continue(row, given) or (row < before < len(self._counts) and self._take(before, row, given))):
            values, holes = _values(row, given)
            self._write(row, values)
            self._put(row, given.copy(), len(values), holes)
        if len(self._row_of) > _HINTS_PER_ROW * len(self.rows):
            self._row_of.clear()
        self._row_of[id(blocks)] = row
        return self._counts[row], self._holes[row]

    def set_rows(self, first: int, blocks: Tensor, counts: list[int]) -> None:
        """
        Write the blocks of many requests, which are checked.

        Args:
            first: The row of the first one: an existing row, or the next.
            blocks: ``(num_reqs, columns)``, 0 behind a request's blocks.
            counts: Blocks of each request, the last of which is not freed.
        """
        end, width = first + len(counts), blocks.shape[1]
        self._reserve(end, width)
        rows, before = self._tensor[first:end], max(self._counts[first:end], default=0)
        rows[:, :width] = blocks
        if before > width:
            rows[:, width:before] = 0
        self.rows[first:end] = [_ARRAY_ROW] * len(counts)
        self._counts[first:end], self._holes[first:end] = counts, [0] * len(counts)
        if len(self.rows) == len(self._counts):
            self.rows.append(_NO_ROW)

    def has_freed(self, row: int, start: int, end: int) -> bool:
        """Whether a column of a row, in ``[start, end)``, has a freed block."""
        first = row * self._tensor.shape[1]
        return 0 in self._cells[first + start : first + end]

    def to_tensor(self, rows: int, columns: int | None = None, padded_rows: int | None = None) -> Tensor:
        """
        Return a copy of the first rows as an int32 tensor, with the null block in unused entries and padded rows.

        Args:
            rows: Rows in use.
            columns: Columns of the result; None is the length of the longest row.
            padded_rows: Rows of the result; None is `rows`.

        Raises:
            BatchError: A row is longer than `columns`.
        """
        longest = max(self._counts[:rows], default=0)
        part = self._tensor[:rows, :longest]
        found = padded_table(part, columns, rows if padded_rows is None else padded_rows)
        return part.clone(memory_format=torch.contiguous_format) if found is part else found

    def _continue(self, row: int, blocks: list[int | None]) -> bool:
        """
        Write what is new in a row: freed blocks behind those at the start, and blocks at the end.

        Returns:
            Whether nothing else is new; otherwise the row is not changed.
        """
        if row >= len(self._counts):
            return False
        given, count, holes = self.rows[row][0], self._counts[row], self._holes[row]
        if given == blocks:
            return True
        known = len(given)
        if count < known or len(blocks) < known or not known or blocks[known - 1] != given[known - 1]:
            return False
        freed = _end_of_freed(blocks, holes, known)
        try:
            added, least = _converted(blocks[known:])
        except (TypeError, OverflowError):
            return False
        if least < 1 or not _amend(given, blocks, holes, freed):
            return False
        self._reserve(row + 1, len(blocks))
        first = row * self._tensor.shape[1]
        self._cells[first + holes : first + freed] = _zeros(freed - holes)
        self._cells[first + count : first + len(blocks)] = added
        self._put(row, given, len(blocks), freed)
        return True

    def _take(self, source: int, row: int, blocks: list[int | None]) -> bool:
        """Exchange a row with a later one if that continues in it; return whether it does."""
        if self.rows[source][0][:1] != blocks[:1] and self._holes[source] == 0:
            return False
        self._exchange(source, row)
        if self._continue(row, blocks):
            return True
        self._exchange(source, row)
        return False

    def _exchange(self, one: int, other: int) -> None:
        columns = self._tensor.shape[1]
        width = max(self._counts[one], self._counts[other])
        here = slice(one * columns, one * columns + width)
        there = slice(other * columns, other * columns + width)
        self._cells[here], self._cells[there] = self._cells[there], self._cells[here]
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        self._counts[one], self._counts[other] = self._counts[other], self._counts[one]
        self._holes[one], self._holes[other] = self._holes[other], self._holes[one]

    def _write(self, row: int, values: array[int]) -> None:
        count, old_count = len(values), self._counts[row] if row < len(self._counts) else 0
        self._reserve(row + 1, count)
        start = row * self._tensor.shape[1]
        self._cells[start : start + count] = values
        if old_count > count:
            self._cells[start + count : start + old_count] = _zeros(old_count - count)

    def _put(self, row: int, given: list[int | None], count: int, holes: int) -> None:
        """Record a row that was written."""
        most = count * self._block_size
        least = fewest_computed_tokens(holes, self._block_size, **self._window) if holes else 0
        if row == len(self._counts):
            self.rows.append(_NO_ROW)
            self._counts.append(0)
            self._holes.append(0)
        self.rows[row] = (given, most if least is None else least, most)
        self._counts[row], self._holes[row] = count, holes

    def _reserve(self, rows: int, columns: int) -> None:
        """Make room, doubling what has to grow."""
        had_rows, had_columns = self._tensor.shape
        if rows <= had_rows and columns <= had_columns:
            return
        rows = had_rows if rows <= had_rows else max(rows, 2 * had_rows)
        columns = had_columns if columns <= had_columns else max(columns, 2 * had_columns)
        old, self._cells = self._tensor, array("i", bytes(4 * rows * columns))
        self._tensor = _view(self._cells, columns)
        self._tensor[:had_rows, :had_columns] = old


def padded_table(table: Tensor, columns: int | None, rows: int) -> Tensor:
    """
    Return a block table with the null block in further columns and rows, or itself where there are none.

    Args:
        table: ``(requests, blocks of the longest one)`` int32.
        columns: Columns of the result; None adds none.
        rows: Rows of the result.

    Raises:
        BatchError: The table has more columns.
    """
    requests, longest = table.shape
    columns = longest if columns is None else columns
    if columns < longest:
        raise BatchError(
            f"a block table of {columns} columns was requested",
            f"a request of this step has {longest} blocks",
            f"pass num_blocks={longest} or more",
        )
    if (rows, columns) == (requests, longest):
        return table
    found = torch.zeros(rows, columns, dtype=torch.int32, device="cpu")
    found[:requests, :longest] = table
    return found


def _view(cells: array[int], columns: int) -> Tensor:
    return torch.frombuffer(cells, dtype=torch.int32).view(-1, columns)


def _zeros(count: int) -> array[int]:
    return array("i", bytes(4 * count))


def _end_of_freed(blocks: list[int | None], start: int, end: int) -> int:
    """Return where the freed blocks from `start` on end, at most `end`."""
    while start < min(end, len(blocks)) and _is_freed(blocks[start]):
        start += 1
    return start


def _amend(given: list[int | None], blocks: list[int | None], start: int, end: int) -> bool:
    """
    Make `given` equal to `blocks`, which differ in a range and by further ones; return whether nothing else differs.

    In place: a copy of a list touches each of its numbers, which takes microseconds where they are not in the caches.
    If more differs, it is left as it was.
    """
    known, replaced = len(given), given[start:end]
    same = False
    try:
        given[start:end] = blocks[start:end]
        given += blocks[known:]
        same = given == blocks
    finally:
        if not same:
            del given[known:]
            given[start:end] = replaced
    return same


def _is_freed(block: object) -> bool:
    return block is None or (type(block) is int and block == 0)


def _values(row: int, blocks: Sequence[int | None]) -> tuple[array[int], int]:
    """Return the blocks with freed ones as 0 and none of these at the end, and the blocks up to the last freed one."""
    try:
        values, least = _converted(blocks)
    except TypeError:
        if None not in blocks:
            raise _invalid_block(row, blocks) from None
        return _values(row, [block or 0 for block in blocks])
    except OverflowError:
        raise _invalid_block(row, blocks) from None
    if least < 0:
        raise _invalid_block(row, blocks)
    if least > 0:
        return values, 0
    while values and not values[-1]:
        values.pop()
    return values, max((column + 1 for column, block in enumerate(values) if not block), default=0)


def _converted(blocks: Sequence[Any]) -> tuple[array[int], int]:
    return array("i", blocks), min(blocks, default=1)


def _invalid_block(row: int, blocks: Sequence[int | None]) -> BatchError:
    wrong = next(
        (block for block in blocks if block is not None and not (isinstance(block, int) and 0 <= block < 2**31)),
        blocks,
    )
    return BatchError(
        f"request {row} was given with the block {wrong!r}",
        "a block is an integer from 0 to 2**31 - 1; None and 0 are freed blocks",
        "pass block numbers of the KV cache",
    )
