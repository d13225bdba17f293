"""Positions and slots of a batch's new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.inputs.batch import PAD_SLOT_ID
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch


POSITIONS = "positions"
"""The key of `Batch.cached` for the positions."""


def positions_of(batch: Batch) -> Tensor:
    """
    Return the position of every query token in its request, for rotary embeddings for example.

    ``(rows,)`` int64 on the batch's device; computed once per batch, without waiting for the device. The rows are the
    tokens, then position 0 for each padded row of the slot mapping. Not for cross attention, whose keys are another
    sequence than its queries.
    """
    return batch.cached(POSITIONS, lambda: _positions_of(batch))


def _positions_of(batch: Batch) -> Tensor:
    computed = (batch.seq_lens - batch.query_start_loc.diff()).clamp_(min=0)  # padding in a graph has rows, no keys
    slots = batch.slot_mapping
    rows = batch.num_actual_tokens if slots is None else max(batch.num_actual_tokens, slots.shape[0])
    return positions_of_new_tokens(
        batch.query_start_loc, computed, num_tokens=batch.num_actual_tokens, num_padded_tokens=rows
    )


def positions_of_new_tokens(
    query_start_loc: Tensor, num_computed_tokens: Tensor, *, num_tokens: int, num_padded_tokens: int | None = None
) -> Tensor:
    """
    Return the position of every new token in its request. The tensors are on any one device.

    Args:
        query_start_loc: ``(num_reqs + 1,)`` integers.
        num_computed_tokens: ``(num_reqs,)`` tokens of each request that are cached already: its first new position.
        num_tokens: New tokens, the last entry of `query_start_loc`.
        num_padded_tokens: Rows of the result; those after `num_tokens` are 0. None adds none.

    Returns:
        ``(num_padded_tokens,)`` int64.

    Raises:
        BatchError: There are fewer padded tokens than tokens.
    """
    total = padded_rows(num_tokens, num_padded_tokens)
    positions = requests_and_positions(query_start_loc, num_computed_tokens, num_tokens)[1]
    return positions if total == num_tokens else torch.cat([positions, positions.new_zeros(total - num_tokens)])


def num_unpadded_tokens(query_start_loc: Tensor, seq_lens: Tensor) -> Tensor:
    """
    Return the query tokens of requests with keys. The rows behind them are padding, which comes last.

    In the graph of batches with one query length, padded requests have rows and no key. A kernel that needs a key in
    each request gets ``query_start_loc.minimum(num_unpadded_tokens(query_start_loc, seq_lens))``.

    Args:
        query_start_loc: ``(num_reqs + 1,)`` integers.
        seq_lens: ``(num_reqs,)`` integers, on the same device.

    Returns:
        A tensor without dimensions, there too: nothing is read from the device.
    """
    return query_start_loc[1:].masked_fill(seq_lens == 0, 0).amax()


def padded_rows(num_tokens: int, num_padded_tokens: int | None) -> int:
    """
    Return the rows after padding.

    Raises:
        BatchError: There are fewer padded tokens than tokens.
    """
    if num_padded_tokens is None or num_padded_tokens >= num_tokens:
        return num_tokens if num_padded_tokens is None else num_padded_tokens
    raise BatchError(
        f"num_padded_tokens={num_padded_tokens} was given for {num_tokens} tokens",
        "padding adds rows",
        "pass at least num_tokens, or omit num_padded_tokens",
    )


def requests_and_positions(
    query_start_loc: Tensor, num_computed_tokens: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the request of every new token and its position there, ``(num_tokens,)`` int64 each."""
    rows = torch.arange(num_tokens, device=query_start_loc.device)
    starts = query_start_loc.long()
    requests = torch.searchsorted(starts[1:], rows, right=True)
    shifts = num_computed_tokens.long() - starts[:-1]
    return requests, rows + shifts[requests]


def slots_of_new_tokens(
    block_table: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    block_size: int,
    *,
    num_tokens: int,
    num_padded_tokens: int | None = None,
) -> Tensor:
    """
    Return the slot of every new token: ``block_id * block_size + offset`` of its position in its request.

    The tensors are on any one device, which is not waited for.

    Args:
        block_table: ``(num_reqs, max_blocks)`` integers.
        query_start_loc: ``(num_reqs + 1,)`` integers.
        num_computed_tokens: ``(num_reqs,)`` tokens of each request that are cached already: its first new position.
        block_size: Slots per block.
        num_tokens: New tokens, the last entry of `query_start_loc`.
        num_padded_tokens: Rows of the result; those after `num_tokens` are PAD_SLOT_ID. None adds none.

    Returns:
        ``(num_padded_tokens,)`` int64.

    Raises:
        BatchError: A request on the CPU has more tokens than its row of the block table has slots, or there are fewer
            padded tokens than tokens.
    """
    total = padded_rows(num_tokens, num_padded_tokens)
    padding = block_table.new_full((total - num_tokens,), PAD_SLOT_ID, dtype=torch.int64)
    if not num_tokens:
        return padding
    requests, positions = requests_and_positions(query_start_loc, num_computed_tokens, num_tokens)
    _check_columns(block_table, positions, block_size)
    slots = slots_at(block_table, requests, positions, block_size)
    return slots if total == num_tokens else torch.cat([slots, padding])


def slots_at(block_table: Tensor, requests: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """
    Return the slots of tokens, ``(num_tokens,)`` int64.

    Args:
        block_table: ``(num_reqs, max_blocks)`` integers, contiguous.
        requests: ``(num_tokens,)`` int64, the request of each.
        positions: ``(num_tokens,)`` int64, the position of each in its request, which has a block.
        block_size: Slots per block.
    """
    # Nearly all blocks have a power of two of slots; a division takes the CPU twenty times as long as a shift.
    shift = block_size.bit_length() - 1
    columns = positions >> shift if block_size == 1 << shift else positions // block_size
    blocks = block_table.take(torch.add(columns, requests, alpha=block_table.shape[1]))
    return torch.add(positions, blocks - columns, alpha=block_size)  # block * size + position - column * size


def _check_columns(block_table: Tensor, positions: Tensor, block_size: int) -> None:
    """Check tensors on the CPU. A device would be waited for: there the builder's guards check the CPU copies."""
    if block_table.device.type == "cpu" and (column := int(positions.max()) // block_size) >= block_table.shape[1]:
        raise BatchError(
            f"a request needs its logical block {column}",
            f"the block table has {block_table.shape[1]} columns of {block_size} slots",
            "allocate the request's blocks before its step",
        )
