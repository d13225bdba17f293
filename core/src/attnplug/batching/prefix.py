"""The prefix that all requests of a batch share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch


def shared_prefix_len(batch: Batch, block_size: int) -> int:
    """
    Return how many cached tokens at their start all requests have in the same blocks: whole blocks, 0 for none.

    It is the most that `Batch.common_prefix_len` may be; `MetadataBuilder.use_cascade_attention` returns whether a
    cascade is expected to be faster. Requests without queries, such as padded ones, do not count; a single request
    shares nothing.

    Args:
        batch: A paged batch with CPU copies of its lengths and its block table.
        block_size: Slots per block.

    Raises:
        BatchError: A CPU copy is missing.
    """
    table, lengths, starts = batch.block_table_cpu, batch.seq_lens_cpu, batch.query_start_loc_cpu
    if table is None or lengths is None or starts is None:
        raise BatchError(
            "a batch without block_table_cpu, seq_lens_cpu or query_start_loc_cpu was given",
            "a shared prefix is found from CPU copies, so that nothing waits for the device",
            "pass the three, as BatchAssembler and Batch.from_lengths do",
        )
    query_lens = starts.diff()
    running = query_lens > 0
    rows, computed = table[running], (lengths - query_lens)[running]
    if rows.shape[0] < 2:
        return 0
    columns = rows[:, : max(0, int(computed.min())) // block_size]
    same = (columns == columns[0]).all(0) & (columns[0] > 0)
    return int(same.int().cumprod(0).sum()) * block_size


def shared_prefix_blocks(batch: Batch, block_size: int) -> Tensor:
    """
    Return the blocks of the shared prefix, ``(1, blocks)``: those of the first request that has a query.

    Padded requests may be anywhere, and have the null block in their rows of the block table.

    Args:
        batch: A checked batch with a shared prefix, so that some request has a query.
        block_size: Slots per block.

    Raises:
        BatchError: The block table or `query_start_loc_cpu` is missing.
    """
    table, starts = batch.block_table, batch.query_start_loc_cpu
    if table is None or starts is None:
        raise BatchError(
            "a batch without block_table or query_start_loc_cpu was given",
            "the blocks of a shared prefix are those of the first request that has a query, found from CPU lengths",
            "pass both, as BatchAssembler and Batch.from_lengths do",
        )
    first = 0 if int(starts[1]) else int(starts.diff().ne(0).int().argmax())
    return table[first : first + 1, : batch.common_prefix_len // block_size]
