"""The first key that a step's queries attend to: blocks before it may be freed."""

from __future__ import annotations


def first_attended_key(
    num_computed_tokens: int, *, sliding_window: int | None = None, attention_chunk: int | None = None
) -> int:
    """
    Return the first key that a query of a request's next step attends to.

    Args:
        num_computed_tokens: Tokens of the request that are cached already: the position of its first query.
        sliding_window: Tokens that a token attends to, itself included; None for all.
        attention_chunk: Tokens per chunk of chunked-local attention; None for none.
    """
    first = 0 if sliding_window is None else max(0, num_computed_tokens - sliding_window + 1)
    if attention_chunk is None:
        return first
    return max(first, num_computed_tokens - num_computed_tokens % attention_chunk)


def num_freeable_blocks(
    num_computed_tokens: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
) -> int:
    """
    Return how many blocks at a request's start no later query attends to, so that a host may free them.

    They keep their columns in the block table, with the null block in them.

    Args:
        num_computed_tokens: Tokens of the request that are cached already.
        block_size: Slots per block.
        sliding_window: As for `first_attended_key`.
        attention_chunk: Likewise.
    """
    first = first_attended_key(num_computed_tokens, sliding_window=sliding_window, attention_chunk=attention_chunk)
    return first // block_size


def fewest_computed_tokens(
    num_blocks: int, block_size: int, *, sliding_window: int | None = None, attention_chunk: int | None = None
) -> int | None:
    """
    Return the fewest cached tokens at which `num_freeable_blocks` is at least `num_blocks`; None for never.

    Args:
        num_blocks: Blocks at its start that are freed.
        block_size: Slots per block.
        sliding_window: As for `first_attended_key`.
        attention_chunk: Likewise.
    """
    first, found = num_blocks * block_size, []
    if not first:
        return 0
    if sliding_window is not None:
        found.append(first + sliding_window - 1)
    if attention_chunk is not None:
        found.append(-(-first // attention_chunk) * attention_chunk)
    return min(found, default=None)
