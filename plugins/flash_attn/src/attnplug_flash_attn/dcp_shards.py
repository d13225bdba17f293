"""
This rank's share of each sequence: the tokens whose K/V it holds, writes and attends.

Runs of `Parallel.dcp_interleave` tokens go to the ranks in turn. Token ``p`` of a request belongs to rank
``p // interleave % dcp_size``, where it is token ``p // (dcp_size * interleave) * interleave + p % interleave`` of what
that rank holds of the request. A rank's block table and slots count these, and no others: the shares of the first
tokens of a sequence are the first tokens of the shares. New tokens that belong to another rank have PAD_SLOT_ID in this
rank's slot mapping, so that writing skips them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.batching import num_local_tokens_per_dcp_rank, positions_of_new_tokens
from attnplug.contract import PAD_SLOT_ID
from attnplug.errors import BatchError, CacheError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import Batch, Parallel


def local_lens(lens: Tensor, parallel: Parallel) -> Tensor:
    """Return how many of the first tokens of each request this rank holds, on the device of `lens`."""
    return num_local_tokens_per_dcp_rank(lens, parallel.dcp_size, parallel.dcp_rank, parallel.dcp_interleave)


def check_local_shard(batch: Batch, parallel: Parallel, block_size: int) -> None:
    """
    Check the lengths and slots that a host gives for this rank, where it knows them exactly.

    Args:
        batch: With exact host lengths.
        parallel: Who this rank is.
        block_size: Slots per block.

    Raises:
        BatchError: The host counts another share of a sequence.
        CacheError: A token has a slot that is not its place, or belongs to another rank.
    """
    lens, given = batch.seq_lens_cpu, batch.dcp_local_seq_lens_cpu
    if batch.dummy or lens is None:
        return
    if given is not None:
        _check_lens(lens, given, parallel)
    if batch.slot_mapping_cpu is not None and batch.block_table_cpu is not None:
        _check_slots(batch, parallel, block_size)


def _check_lens(lens: Tensor, given: Tensor, parallel: Parallel) -> None:
    held = local_lens(lens, parallel)
    if torch.equal(held, given):
        return
    request = int(held.ne(given).int().argmax())
    raise BatchError(
        f"dcp_local_seq_lens of {int(given[request])} was given for request {request} of {int(lens[request])} tokens",
        f"{_who(parallel)} holds {int(held[request])} of these",
        "pass attnplug.batching.num_local_tokens_per_dcp_rank(seq_lens, ...) with the numbers of Parallel",
    )


def _check_slots(batch: Batch, parallel: Parallel, block_size: int) -> None:
    positions, places = _positions_and_places(batch, parallel, block_size)
    given = _host(batch.slot_mapping_cpu)[: places.shape[0]]
    wrong = (given != places) & (given != PAD_SLOT_ID)
    if not bool(wrong.any()):
        return
    token = int(wrong.int().argmax())
    place = int(places[token])
    raise CacheError(
        f"token {token} has slot {int(given[token])}",
        f"it is token {int(positions[token])} of its request, which {_who(parallel)} "
        + ("does not hold" if place == PAD_SLOT_ID else f"holds in slot {place}"),
        f"compute slots from the rank's own block table, {PAD_SLOT_ID} for tokens of other ranks",
    )


def _positions_and_places(batch: Batch, parallel: Parallel, block_size: int) -> tuple[Tensor, Tensor]:
    """Return each new token's position in its request and its slot, PAD_SLOT_ID where another rank holds it."""
    starts, lens, table = _host(batch.query_start_loc_cpu), _host(batch.seq_lens_cpu), _host(batch.block_table_cpu)
    count, run = int(starts[-1]), parallel.dcp_interleave  # in a graph slot fewer than its rows
    query_lens = starts.diff()
    positions = positions_of_new_tokens(starts, lens - query_lens, num_tokens=count)
    requests = torch.repeat_interleave(query_lens, output_size=count)
    turn = positions // run
    mine = turn % parallel.dcp_size == parallel.dcp_rank
    held = turn // parallel.dcp_size * run + positions % run
    columns = (held // block_size).masked_fill(~mine, 0)
    if not table.shape[1]:  # a rank that holds nothing may have no pages
        return positions, torch.full_like(positions, PAD_SLOT_ID)
    slots = table[requests, columns].long() * block_size + held % block_size
    return positions, slots.masked_fill(~mine, PAD_SLOT_ID)


def _host(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101 - the guard of the builder has seen it
    return tensor


def _who(parallel: Parallel) -> str:
    return f"rank {parallel.dcp_rank} of {parallel.dcp_size}, dealt runs of {parallel.dcp_interleave},"
