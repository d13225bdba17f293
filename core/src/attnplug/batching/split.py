"""Where the decodes of a batch end and its prefills begin."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract.batch import Batch


class Split(NamedTuple):
    """
    Requests and query tokens on either side of the split.

    Attributes:
        num_decodes: Requests at the front.
        num_prefills: The requests after them, padded ones included.
        num_decode_tokens: Query tokens of the decodes: the first rows.
        num_prefill_tokens: Query tokens of the prefills: the rows after them.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(batch: Batch, decode_threshold: int = 1, *, require_uniform: bool = False) -> Split:
    """
    Split a batch that is ordered decodes first. Reads the host copy alone.

    A padded request (query length 0) sides with whatever stands before it.

    Args:
        batch: The batch.
        decode_threshold: The longest query that still counts as a decode.
        require_uniform: Count as decodes only the requests at the front whose query is as long as the first one's, for
            kernels and graphs that take one query length.

    Raises:
        BatchError: A decode stands behind a prefill, the host copy is missing, or the threshold is below 1.
    """
    if decode_threshold < 1:
        raise BatchError(
            f"decode_threshold={decode_threshold} was given",
            "a decode has at least one query token",
            "pass the agreed decode_query_len",
        )
    lengths = _query_lens(batch)
    num_decodes = _leading(lengths, decode_threshold, require_uniform=require_uniform)
    if not require_uniform:
        _refuse_disorder(lengths, num_decodes, decode_threshold)
    tokens = sum(lengths[:num_decodes])
    return Split(num_decodes, len(lengths) - num_decodes, tokens, sum(lengths) - tokens)


def _query_lens(batch: Batch) -> list[int]:
    if batch.query_start_loc_cpu is None:
        raise BatchError(
            "the batch has no query_start_loc_cpu",
            "the split is made from the host's lengths, so that no build waits for the device",
            "give query_start_loc_cpu, or make the batch with Batch.from_lengths",
        )
    starts = batch.query_start_loc_cpu.tolist()
    return [end - start for start, end in pairwise(starts)]


def _leading(lengths: Sequence[int], threshold: int, *, require_uniform: bool) -> int:
    first = lengths[0] if lengths else 0
    for index, length in enumerate(lengths):
        if length > threshold or (require_uniform and length not in (first, 0)):
            return index
    return len(lengths)


def _refuse_disorder(lengths: Sequence[int], num_decodes: int, threshold: int) -> None:
    for index, length in enumerate(lengths[num_decodes:], num_decodes):
        if 0 < length <= threshold:
            raise BatchError(
                f"request {index} has {length} query tokens and stands behind request {num_decodes}, which has "
                f"{lengths[num_decodes]}",
                f"requests of at most {threshold} query tokens (decodes) come first in every batch",
                "order the batch with reorder_batch_to_split_decodes_and_prefills",
            )
