"""Into how many parts the kernels may cut the keys of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnplug.contract import Limits

LIBRARYS_CHOICE: Final = 0
UNSPLIT: Final = 1


def num_splits(limits: Limits, tokens: int, *, batch_invariant: bool) -> int:
    """
    Return the most parts that a step of so many tokens may have; 0 leaves it to the library.

    The partial results of parts are summed in an order that follows from their number, which the library chooses by
    what else is in the batch: only one part is the same everywhere. A graph holds memory for partial results, so that
    batches as small as those that are captured have the host's bound, and larger ones none: of a large batch the
    library would make as many parts as it is told, and not fewer. A bound of one part costs nothing, and holds for all.

    Args:
        limits: With the host's bound, and the sizes that it captures.
        tokens: Query rows of the step, padding included.
        batch_invariant: Whether results may not depend on what else is in the batch.
    """
    if batch_invariant or limits.max_num_splits == UNSPLIT:
        return UNSPLIT
    captured = max(limits.capture_sizes, default=0)
    return limits.max_num_splits or LIBRARYS_CHOICE if tokens <= captured else LIBRARYS_CHOICE
