"""Where the K/V of new tokens go in a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.batching.positions import padded_rows, requests_and_positions
from attnplug.contract.batch import PAD_SLOT_ID
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor


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

    The tensors may live on any one device; nothing waits for it.

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
    columns = positions // block_size
    _check_columns(block_table, columns, block_size)
    blocks = block_table.reshape(-1).index_select(0, requests.mul_(block_table.shape[1]).add_(columns))
    slots = positions.add_(blocks - columns, alpha=block_size)  # block * size + position - column * size
    return slots if total == num_tokens else torch.cat([slots, padding])


def _check_columns(block_table: Tensor, columns: Tensor, block_size: int) -> None:
    """On a device the check would wait for it: there the guards of the builder compare host copies."""
    if block_table.device.type == "cpu" and int(columns.max()) >= block_table.shape[1]:
        raise BatchError(
            f"a request reaches its logical block {int(columns.max())}",
            f"the block table has {block_table.shape[1]} columns of {block_size} slots",
            "allocate the request's blocks before its step",
        )
