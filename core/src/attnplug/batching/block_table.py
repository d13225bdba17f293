"""A block table that is written row by row and kept from step to step."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_Row: TypeAlias = "tuple[list[int | None], int, int]"

_FIRST_ROWS, _FIRST_COLUMNS = 16, 16
_HINTS_PER_ROW = 8


class BlockTable:
    """
    Rows of physical blocks in one growing buffer.

    Most requests have the same blocks as in the step before, or one more: a row is compared, and only what is new in it
    is converted. An `array.array` is filled faster than a tensor; `to_tensor` returns copies, which later steps do not
    change.

    Attributes:
        rows: For each row its blocks as they were given, their number without freed ones at the end, and the number of
            leading blocks up to the last freed one. The lists are copies.
    """

    def __init__(self) -> None:
        self.rows: list[_Row] = []
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
            row: The row.
            blocks: Physical blocks, None or 0 for a freed one.

        Returns:
            The number of blocks without freed ones at the end, and the number of leading blocks up to the last freed
            one.

        Raises:
            BatchError: A block is negative, or not an integer. The row is not changed.
            TypeError: The blocks are not iterable.
        """
        given = blocks if type(blocks) is list else list(blocks)
        # A host passes one list per request, step after step. When a request before it ends, its row is another one.
        # An id may be that of a list which is garbage-collected by now: it is a hint, and the blocks are compared.
        before = self._row_of.get(id(blocks), row)
        if not (self._continue(row, row, given) or (before != row and self._continue(before, row, given))):
            values, holes = _values(row, given)
            self._write(row, values)
            self._put(row, (list(given), len(values), holes))
        if len(self._row_of) > _HINTS_PER_ROW * len(self.rows):
            self._row_of.clear()
        self._row_of[id(blocks)] = row
        return self.rows[row][1:]

    def has_freed(self, row: int, start: int, end: int) -> bool:
        """Whether a column of a row, in ``[start, end)``, has a freed block."""
        first = row * self._tensor.shape[1]
        return 0 in self._cells[first + start : first + end]

    def slots(self, row: int, positions: range, block_size: int) -> list[int]:
        """Return the slots of positions in the blocks of a row."""
        cells, first = self._cells, row * self._tensor.shape[1]
        return [cells[first + one // block_size] * block_size + one % block_size for one in positions]

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
        longest = max([count for _, count, _ in self.rows[:rows]], default=0)
        columns = longest if columns is None else columns
        if columns < longest:
            raise BatchError(
                f"a block table of {columns} columns was requested",
                f"a request of this step has {longest} blocks",
                f"pass num_blocks={longest} or more",
            )
        if columns == longest and padded_rows in {None, rows}:
            return self._tensor[:rows, :longest].clone(memory_format=torch.contiguous_format)
        found = torch.zeros(rows if padded_rows is None else padded_rows, columns, dtype=torch.int32)
        found[:rows, :longest] = self._tensor[:rows, :longest]
        return found

    def _continue(self, source: int, row: int, blocks: list[int | None]) -> bool:
        """
        Write a row that continues `source`: the same blocks, of which more may be freed at the start, and further ones.

        Returns:
            Whether it does; otherwise nothing is written.
        """
        if source >= len(self.rows):
            return False
        entry = self.rows[source]
        if entry[0] == blocks:
            if source != row:
                self._write(row, self._values_of(source))
                self._put(row, entry)
            return True
        change = _change(*entry, blocks)
        if change is None:
            return False
        freed, added = change
        values = self._values_of(source)
        values[:freed] = _zeros(freed)
        values += added
        self._write(row, values)
        self._put(row, (list(blocks), len(values), freed))
        return True

    def _values_of(self, row: int) -> array[int]:
        first = row * self._tensor.shape[1]
        return self._cells[first : first + self.rows[row][1]]

    def _write(self, row: int, values: array[int]) -> None:
        count, old_count = len(values), self.rows[row][1] if row < len(self.rows) else 0
        self._reserve(row + 1, count)
        start = row * self._tensor.shape[1]
        self._cells[start : start + count] = values
        if old_count > count:
            self._cells[start + count : start + old_count] = _zeros(old_count - count)

    def _put(self, row: int, entry: _Row) -> None:
        self.rows[row : row + 1] = [entry]

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


def _view(cells: array[int], columns: int) -> Tensor:
    return torch.frombuffer(cells, dtype=torch.int32).view(-1, columns)


def _zeros(count: int) -> array[int]:
    return array("i", bytes(4 * count))


def _change(given: list[int | None], count: int, holes: int, blocks: list[int | None]) -> tuple[int, array[int]] | None:
    """
    Return what is new in blocks since they were `given`: how many are freed at the start, and those that were added.

    None where there are other changes, or other freed blocks than leading ones.
    """
    known, freed = len(given), holes
    if count < known or len(blocks) < known or any(given[:holes]):
        return None
    while freed < known and _is_freed(blocks[freed]):
        freed += 1
    if freed == known or blocks[:holes] != given[:holes] or blocks[freed:known] != given[freed:]:
        return None
    try:
        added, least = _converted(blocks[known:])
    except (TypeError, OverflowError):
        return None
    return (freed, added) if least > 0 else None


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
