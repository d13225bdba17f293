"""Where the query tokens of a batch stand in their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.batch import Batch

POSITIONS = "positions"
"""The key under which `Batch.once` keeps them."""


def positions_of(batch: Batch) -> Tensor:
    """
    Return the position of every query token in its request, which rotary embeddings and the like need.

    ``(rows,)`` int64 on the batch's device; computed once per batch, without waiting for the device. The rows are the
    tokens and, where the slot mapping is padded, as many padded rows with position 0. Meaningful for self-attention:
    the keys of cross attention are another sequence than its queries.
    """
    return batch.once(POSITIONS, lambda: _positions_of(batch))


def _positions_of(batch: Batch) -> Tensor:
    computed = batch.seq_lens - batch.query_start_loc.diff()
    slots = batch.slot_mapping
    rows = batch.num_actual_tokens if slots is None else max(batch.num_actual_tokens, slots.shape[0])
    return positions_of_new_tokens(
        batch.query_start_loc, computed, num_tokens=batch.num_actual_tokens, num_padded_tokens=rows
    )


def positions_of_new_tokens(
    query_start_loc: Tensor, num_computed_tokens: Tensor, *, num_tokens: int, num_padded_tokens: int | None = None
) -> Tensor:
    """
    Return the position of every new token in its request. The tensors may live on any one device.

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
        "pass at least num_tokens, or leave num_padded_tokens out",
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
