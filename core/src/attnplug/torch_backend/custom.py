"""The mask that comes with a batch, one entry per query and key of a request."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.torch_backend.grouping import Span


@frozen(eq=False)
class CustomMask:
    """
    A batch's mask.

    Attributes:
        flat: ``(sum(query_len * seq_len),)`` bool, the requests' masks one after another, True attends.
        query_lens: Query rows per request.
        seq_lens: Keys per request.
        index: Puts integers onto the device.
    """

    flat: Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    index: Callable[[list[int]], Tensor]
    _starts: list[int] = field(init=False)
    _first_rows: list[int] = field(init=False)

    @_starts.default
    def _find_starts(self) -> list[int]:
        sizes = (rows * keys for rows, keys in zip(self.query_lens, self.seq_lens, strict=True))
        return [0, *accumulate(sizes)]

    @_first_rows.default
    def _find_first_rows(self) -> list[int]:
        return [0, *accumulate(self.query_lens)]

    def of(self, group: list[Span], lens: Tensor, rows: int, keys: int) -> Tensor:
        """
        Return a group's part, ``(members, rows, keys)``. Rows and keys beyond a member's own repeat its last ones.

        Args:
            group: Its members.
            lens: ``(2, members)`` rows and keys of each.
            rows: The most rows.
            keys: The most keys.
        """
        firsts = [self._first(span) for span in group]
        first, width = self.index([*firsts, *(self.seq_lens[span.request] for span in group)]).view(2, -1, 1)
        row = torch.minimum(torch.arange(rows, device=lens.device), lens[0].unsqueeze(1) - 1)
        key = torch.minimum(torch.arange(keys, device=lens.device), lens[1].unsqueeze(1) - 1)
        return self.flat[(first + row * width).unsqueeze(2) + key.unsqueeze(1)]

    def _first(self, span: Span) -> int:
        """Where the span's first row meets its first key."""
        row = span.first_row - self._first_rows[span.request]
        return self._starts[span.request] + row * self.seq_lens[span.request] + span.first_key
