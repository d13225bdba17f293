"""What a `BatchAssembler` refuses, in words."""

from __future__ import annotations

from typing import NoReturn

from attnplug.errors import BatchError
from attnplug.negotiation.agreement import Agreement


def check_agreement(agreement: object) -> None:
    """
    Check what `BatchAssembler.of` takes.

    Raises:
        BatchError: It is something else.
    """
    if not isinstance(agreement, Agreement):
        raise BatchError(
            f"a {type(agreement).__name__} was given to BatchAssembler.of",
            "it takes the Agreement of the group's layers",
            "pass backend.agreement",
        )


def padded_count(what: str, count: int, padded: int | None) -> int:
    """
    Return the requests or tokens of a step after padding.

    Args:
        what: ``"requests"`` or ``"tokens"``.
        count: How many were added.
        padded: How many there are to be; None adds none.

    Raises:
        BatchError: Nothing was added, or more.
    """
    if not count:
        raise BatchError(
            "finish was called with no requests",
            "a batch has at least one request and one token",
            "skip the step when nothing is scheduled",
        )
    if padded is not None and padded < count:
        raise BatchError(
            f"{count} {what} are to be padded to {padded}",
            f"padding adds {what}",
            "pass a size from padded_size",
        )
    return count if padded is None else padded


def invalid_numbers(query_len: int, num_computed_tokens: int, write_from: int) -> BatchError:
    """Return the error for a number that is negative, or an empty query."""
    return BatchError(
        f"query_len={query_len}, num_computed_tokens={num_computed_tokens} and write_from={write_from} were given",
        "a request of a step has at least one new token, and no number is negative",
        "add only scheduled requests; recompute at least the last token of a prompt that is completely cached",
    )


def invalid_blocks(row: int, blocks: object) -> BatchError:
    """Return the error for blocks that are no list."""
    return BatchError(
        f"request {row} was given with blocks={blocks!r}",
        "its blocks are a list of block numbers, from its first token on",
        "pass block numbers of the KV cache",
    )


def refuse_blocks(row: int, seq_len: int, count: int, block_size: int) -> NoReturn:
    """
    Refuse a request with too few blocks.

    Args:
        row: Its row.
        seq_len: Its tokens, new ones included.
        count: Its blocks.
        block_size: Slots per block.

    Raises:
        BatchError: Always.
    """
    raise BatchError(
        f"request {row} was given with {count} blocks for {seq_len} tokens",
        f"{seq_len} tokens need {-(-seq_len // block_size)} blocks of {block_size} slots",
        "allocate the request's blocks before its step",
    )
