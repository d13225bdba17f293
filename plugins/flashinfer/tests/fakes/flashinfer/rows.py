"""The query rows of wrappers with several rows per request."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from flashinfer.misuse import require


@define(eq=False)
class Rows:
    """
    The rows of each request.

    Attributes:
        buffer: The indptr that the kernels read: a graph's, or that of the last plan.
        most: The rows of the first plan of a graph; later plans may not have more.
        captured: The rows of the first run of a graph; replays have as many, whatever their plans.
    """

    buffer: Tensor = field(factory=lambda: torch.zeros(1, dtype=torch.int32))
    most: int | None = None
    captured: int | None = None

    def take(self, indptr: Tensor, *, is_fixed: bool) -> None:
        """
        Set the rows of a plan.

        Raises:
            ValueError: There are more rows than in a graph's first plan.
            MisuseError: There are no rows.
        """
        total = int(indptr[-1])
        require(total > 0, "a plan without rows")
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
        """Return the number of rows of a run: those of its plan, or those of the graph's capture."""
        planned = int(self.buffer[-1])
        if not is_fixed:
            return planned
        if self.captured is None and query.shape[0] == planned:
            self.captured = planned
        return planned if self.captured is None else self.captured
