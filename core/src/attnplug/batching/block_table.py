"""A block table that is written row by row and kept from step to step."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_FIRST_ROWS, _FIRST_COLUMNS = 16, 16


class BlockTable:
    """
    Rows of physical blocks in one growing buffer.

    Most requests have the same blocks as in the step before: a row is compared, which takes a fraction of a
    microsecond, and written only if it differs. An `array.array` is filled faster than a tensor; `to_tensor` returns
    copies, which later steps do not change.
    """

    def __init__(self) -> None:
        self._given: list[list[int | None]] = []
        self._counts: list[int] = []
        self._holes: list[int] = []
        self._cells = array("i", bytes(4 * _FIRST_ROWS * _FIRST_COLUMNS))
        self._tensor = _view(self._cells, _FIRST_COLUMNS)

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
        """
        if row < len(self._given) and self._given[row] == blocks:
            return self._counts[row], self._holes[row]
        values, holes = _values(row, blocks)
        count = len(values)
        if row == len(self._given):
            self._given.append([])
            self._counts.append(0)
            self._holes.append(0)
        self._reserve(row + 1, count)
        self._write(row, values, self._counts[row])
        self._given[row], self._counts[row], self._holes[row] = list(blocks), count, holes
        return count, holes

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
        longest = max(self._counts[:rows], default=0)
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

    def _write(self, row: int, values: array[int], old_count: int) -> None:
        start, count = row * self._tensor.shape[1], len(values)
        self._cells[start : start + count] = values
        if old_count > count:
            self._cells[start + count : start + old_count] = array("i", bytes(4 * (old_count - count)))

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
