"""
The shard of each sequence on a rank of decode context parallelism (DCP): the tokens whose K/V it caches.

Runs of `Parallel.dcp_interleave` tokens are distributed round-robin over the ranks. Token ``p`` of a request is on rank
``p // interleave % dcp_size``, where it is the request's local token
``p // (dcp_size * interleave) * interleave + p % interleave``. The block table and slots of a rank count local tokens.
New tokens of other ranks have PAD_SLOT_ID in this rank's slot mapping, so that they are not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.batching.slots import positions_of_new_tokens
from attnplug.contract.inputs.batch import PAD_SLOT_ID
from attnplug.errors import BatchError, CacheError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.limits import Parallel


def num_local_tokens_per_dcp_rank(seq_lens: Tensor, world_size: int, rank: int, interleave: int = 1) -> Tensor:
    """
    Return how many tokens of each sequence one rank holds, with runs of `interleave` tokens distributed round-robin.

    Args:
        seq_lens: Lengths of whole sequences: integers of any shape, on any device, which is not waited for.
        world_size: Ranks.
        rank: The rank, below `world_size`.
        interleave: Consecutive tokens that one rank holds.

    Returns:
        A tensor of the shape, dtype and device of `seq_lens`.

    Raises:
        BatchError: The ranks or the interleave are not positive, or the rank is not below their number.
    """
    _check(world_size, interleave)
    if not 0 <= rank < world_size:
        raise BatchError(
            f"rank={rank} was given", f"ranks are 0 to {world_size - 1}", "pass the rank within its DCP group"
        )
    round_size = world_size * interleave
    base = seq_lens // round_size * interleave
    remainder = seq_lens % round_size
    return base + (remainder - rank * interleave).clamp(0, interleave)


def max_local_tokens_per_dcp_rank(max_seq_len: int, world_size: int, interleave: int = 1) -> int:
    """
    Return an upper bound of the tokens that any rank holds of any sequence, without reading a device.

    It is ``ceil(max_seq_len / (world_size * interleave)) * interleave``: the tokens of rank 0, with the sequence
    rounded up to whole rounds.

    Args:
        max_seq_len: The longest whole sequence, in tokens.
        world_size: Ranks.
        interleave: Consecutive tokens that one rank holds.

    Raises:
        BatchError: The ranks or the interleave are not positive, or the length is negative.
    """
    _check(world_size, interleave)
    if max_seq_len < 0:
        raise BatchError(f"max_seq_len={max_seq_len} was given", "lengths are not negative", "pass a number of tokens")
    return -(-max_seq_len // (world_size * interleave)) * interleave


def local_lens(lens: Tensor, parallel: Parallel) -> Tensor:
    """Return how many of the first `lens` tokens of each request are on this rank, on the device of `lens`."""
    return num_local_tokens_per_dcp_rank(lens, parallel.dcp_size, parallel.dcp_rank, parallel.dcp_interleave)


def check_local_shard(batch: Batch, parallel: Parallel, block_size: int) -> None:
    """
    Check the local lengths and slots of a batch, if the CPU sequence lengths are exact.

    Args:
        batch: The batch, with exact CPU sequence lengths.
        parallel: The sizes, and the index of this rank.
        block_size: Slots per block.

    Raises:
        BatchError: A local length is wrong.
        CacheError: A token has a wrong slot, or is on another rank.
    """
    lens, local = batch.seq_lens_cpu, batch.dcp_local_seq_lens_cpu
    if batch.dummy or lens is None:
        return
    if local is not None:
        _check_lens(lens, local, parallel)
    if batch.slot_mapping_cpu is not None and batch.block_table_cpu is not None:
        _check_slots(batch, parallel, block_size)


def _check_lens(lens: Tensor, local: Tensor, parallel: Parallel) -> None:
    expected = local_lens(lens, parallel)
    if torch.equal(expected, local):
        return
    request = int(expected.ne(local).int().argmax())
    raise BatchError(
        f"dcp_local_seq_lens is {int(local[request])} for request {request} of {int(lens[request])} tokens",
        f"{_name(parallel)} has {int(expected[request])} of them",
        "pass attnplug.batching.num_local_tokens_per_dcp_rank(seq_lens, ...) with the numbers of Parallel",
    )


def _check_slots(batch: Batch, parallel: Parallel, block_size: int) -> None:
    positions, expected = _positions_and_slots(batch, parallel, block_size)
    slots = _on_cpu(batch.slot_mapping_cpu)[: expected.shape[0]]
    wrong = (slots != expected) & (slots != PAD_SLOT_ID)
    if not bool(wrong.any()):
        return
    token = int(wrong.int().argmax())
    slot = int(expected[token])
    raise CacheError(
        f"token {token} has slot {int(slots[token])}",
        f"it is token {int(positions[token])} of its request, which {_name(parallel)} "
        + ("does not have" if slot == PAD_SLOT_ID else f"has in slot {slot}"),
        f"compute slots from this rank's block table, with {PAD_SLOT_ID} for tokens of other ranks",
    )


def _positions_and_slots(batch: Batch, parallel: Parallel, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the position of each new token in its request, and its slot: PAD_SLOT_ID for tokens of other ranks."""
    starts, lens, table = map(_on_cpu, (batch.query_start_loc_cpu, batch.seq_lens_cpu, batch.block_table_cpu))
    count, run = int(starts[-1]), parallel.dcp_interleave  # in a graph, fewer than its rows
    query_lens = starts.diff()
    positions = positions_of_new_tokens(starts, lens - query_lens, num_tokens=count)
    requests = torch.repeat_interleave(query_lens, output_size=count)
    index = positions // run
    is_local = index % parallel.dcp_size == parallel.dcp_rank
    local = index // parallel.dcp_size * run + positions % run
    columns = (local // block_size).masked_fill(~is_local, 0)
    if not table.shape[1]:  # a rank without cached tokens may have no pages
        return positions, torch.full_like(positions, PAD_SLOT_ID)
    slots = table[requests, columns].long() * block_size + local % block_size
    return positions, slots.masked_fill(~is_local, PAD_SLOT_ID)


def _on_cpu(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101 - the guards have checked it
    return tensor


def _name(parallel: Parallel) -> str:
    return f"rank {parallel.dcp_rank} of {parallel.dcp_size}, with runs of {parallel.dcp_interleave} tokens,"


def _check(world_size: int, interleave: int) -> None:
    if world_size < 1 or interleave < 1:
        raise BatchError(
            f"world_size={world_size} and interleave={interleave} were given",
            "there is at least one rank, and a rank holds at least one token at a time",
            "pass dcp_size and dcp_interleave of Parallel",
        )
