"""How many tokens of a sequence each rank of decode context parallelism (DCP) holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor


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


def _check(world_size: int, interleave: int) -> None:
    if world_size < 1 or interleave < 1:
        raise BatchError(
            f"world_size={world_size} and interleave={interleave} were given",
            "there is at least one rank, and a rank holds at least one token at a time",
            "pass dcp_size and dcp_interleave of Parallel",
        )
