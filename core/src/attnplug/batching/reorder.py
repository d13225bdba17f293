"""Puts decodes before prefills with the fewest swaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from attrs import frozen

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, MutableSequence, Sequence

_R = TypeVar("_R", bound="Hashable")
_T = TypeVar("_T")


@frozen
class Reordering(Generic[_R]):
    """
    A new order of a batch's requests.

    Attributes:
        order: The requests, decodes first.
        swaps: Pairs of positions to exchange, to get there from the old order. No position is in two of them.
    """

    order: tuple[_R, ...]
    swaps: tuple[tuple[int, int], ...]

    @property
    def changed(self) -> bool:
        """Whether the order differs from the one before."""
        return bool(self.swaps)

    def apply(self, state: MutableSequence[_T]) -> None:
        """Permute a host's per-request state in place, the way the requests were permuted."""
        for front, back in self.swaps:
            state[front], state[back] = state[back], state[front]


def reorder_batch_to_split_decodes_and_prefills(
    order: Sequence[_R], scheduled_tokens: Mapping[_R, int], decode_threshold: int = 1
) -> Reordering[_R]:
    """
    Put every request with at most `decode_threshold` scheduled tokens first.

    One swap per misplaced decode is the least that can do it: a swap brings at most one of them to the front.

    Args:
        order: The requests as they stand, each once.
        scheduled_tokens: New tokens of each request in this step.
        decode_threshold: The most tokens that still count as a decode.

    Raises:
        BatchError: A request has no entry in `scheduled_tokens`.
    """
    missing = [request for request in order if request not in scheduled_tokens]
    if missing:
        raise BatchError(
            f"no scheduled tokens were given for {missing!r}",
            "every request of the order has a number of scheduled tokens",
            "add these requests to scheduled_tokens, with 0 for requests that pause",
        )
    is_decode = [scheduled_tokens[request] <= decode_threshold for request in order]
    num_decodes = sum(is_decode)
    in_front = [i for i in range(num_decodes) if not is_decode[i]]
    behind = [i for i in range(num_decodes, len(order)) if is_decode[i]]
    swaps = tuple(zip(in_front, behind, strict=True))
    result = list(order)
    Reordering((), swaps).apply(result)
    return Reordering(tuple(result), swaps)
