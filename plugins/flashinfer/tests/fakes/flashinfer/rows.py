"""The query rows of a wrapper that has several per request."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from flashinfer.misuse import require


@define(eq=False)
class Rows:
    """
    Which rows are whose.

    Attributes:
        buffer: The indptr that kernels read: a graph's, or that of the last plan.
        most: The rows of the first plan of a graph: no later one may have more.
        captured: The rows of the first run of a graph: replays have as many, whatever is planned.
    """

    buffer: Tensor = field(factory=lambda: torch.zeros(1, dtype=torch.int32))
    most: int | None = None
    captured: int | None = None

    def take(self, indptr: Tensor, *, is_fixed: bool) -> None:
        """
        Take the rows of a plan.

        Raises:
            ValueError: There are more of them than in a graph's first plan.
            MisuseError: There are none.
        """
        total = int(indptr[-1])
        require(total > 0, "a plan for no row at all")
        if not is_fixed:
            self.buffer = indptr.clone()
            return
        self.most = total if self.most is None else self.most
        if total > self.most:
            raise ValueError(
                f"The total number of rows in qo_indptr {total} in cuda graph mode cannot exceed the number of rows "
                f"set during initialization {self.most}."
            )
        self.buffer.copy_(indptr)

    def of_run(self, query: Tensor, *, is_fixed: bool) -> int:
        """Return how many rows a run has to bring: those of its plan, or those that its graph was captured with."""
        planned = int(self.buffer[-1])
        if not is_fixed:
            return planned
        if self.captured is None and query.shape[0] == planned:
            self.captured = planned
        return planned if self.captured is None else self.captured
