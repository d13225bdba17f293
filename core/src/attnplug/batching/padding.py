"""Pads a batch to one of a few sizes, for captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract.inputs.batch import PAD_SLOT_ID
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch


NULL_BLOCK: Final = 0
"""The block that no request gets: padded entries of a block table name it."""


def padded_size(size: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` that holds `size`, or None where none does."""
    return min((candidate for candidate in sizes if candidate >= size), default=None)


def pad_rows(tensor: Tensor, rows: int, fill: float) -> Tensor:
    """
    Return the tensor with its first axis extended to `rows`; the new rows hold `fill`.

    Raises:
        BatchError: The tensor has more rows than that.
    """
    if tensor.shape[0] > rows:
        raise BatchError(
            f"{tensor.shape[0]} rows are to be padded to {rows}",
            "padding adds rows",
            "pass a size from padded_size",
        )
    added = torch.full((rows - tensor.shape[0], *tensor.shape[1:]), fill, dtype=tensor.dtype, device=tensor.device)
    return torch.cat([tensor, added])


def pad_block_table(block_table: Tensor, num_reqs: int, num_blocks: int | None = None) -> Tensor:
    """
    Return the block table with rows and columns of the null block added.

    Args:
        block_table: ``(num_reqs, max_blocks)`` integers, on any device.
        num_reqs: Rows of the result.
        num_blocks: Columns of the result; None leaves them.

    Raises:
        BatchError: The table is larger than that.
    """
    rows, columns = block_table.shape
    if num_blocks is None or num_blocks == columns:
        return pad_rows(block_table, num_reqs, NULL_BLOCK)
    if num_blocks < columns:
        raise BatchError(
            f"a block table of {columns} columns is to be padded to {num_blocks}",
            "padding adds columns",
            "pass the blocks of the longest sequence: ceil(max_seq_len / block_size)",
        )
    wider = block_table.new_full((rows, num_blocks), NULL_BLOCK)
    wider[:, :columns] = block_table
    return pad_rows(wider, num_reqs, NULL_BLOCK)


def pad_batch(batch: Batch, num_reqs: int, num_tokens: int | None = None, num_blocks: int | None = None) -> Batch:
    """
    Return the batch with padded requests at its end, padded rows in its slot mapping and columns in its block table.

    Padded requests have no query tokens, no keys and the null block; padded rows have no slot. `num_actual_tokens` does
    not change: padding is never computed.

    Args:
        batch: The batch; not changed.
        num_reqs: Requests after padding.
        num_tokens: Rows of the slot mapping after padding; None leaves them.
        num_blocks: Columns of the block table after padding; None leaves them.

    Raises:
        BatchError: The batch is larger than that, or has a mask or extras, whose size depends on the requests.
    """
    sized = {"a custom mask": batch.custom_mask, "an additive mask": batch.attn_bias, "extra": batch.extra or None}
    for what, present in sized.items():
        if present is not None:
            raise BatchError(
                f"a batch with {what} is to be padded",
                "its size depends on the requests, and padded requests have none of it",
                "run such batches without padding",
            )
    padded: dict[str, Any] = {"num_reqs": num_reqs}
    if batch.num_padded_reqs:  # they are the last ones, so the added ones count too
        padded["num_padded_reqs"] = batch.num_padded_reqs + num_reqs - batch.num_reqs
    for name in _PER_REQUEST:
        _pad(batch, padded, name, num_reqs, 0)
    for name in ("block_table", "block_table_cpu"):
        table: Tensor | None = getattr(batch, name)
        if table is not None:
            padded[name] = pad_block_table(table, num_reqs, num_blocks)
    for name in _CUMULATIVE:
        # Padded requests start and end where the last request ends.
        _pad(batch, padded, name, num_reqs + 1, None)
    if num_tokens is not None:
        _pad(batch, padded, "slot_mapping", num_tokens, PAD_SLOT_ID)
        _pad(batch, padded, "slot_mapping_cpu", num_tokens, PAD_SLOT_ID)
    return evolve(batch, **padded)


def _pad(batch: Batch, padded: dict[str, Any], name: str, rows: int, fill: int | None) -> None:
    tensor: Tensor | None = getattr(batch, name)
    if tensor is None:
        return
    if fill is not None:
        padded[name] = pad_rows(tensor, rows, fill)
        return
    longer = pad_rows(tensor, rows, 0)
    longer[tensor.shape[0] :] = tensor[-1:]
    padded[name] = longer


_PER_REQUEST = (
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
)
_CUMULATIVE = ("query_start_loc", "query_start_loc_cpu", "key_start_loc", "key_start_loc_cpu")
