"""Custom masks in graphs: one tensor per shape, of the largest size that the shape's masks may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnplug.contract.graphs.shape import GraphShape


class GraphMask:
    """
    The mask that the graph of one shape reads for one builder, ``(num_reqs, query_len, max_seq_len)`` bool.

    Each request has the shape's query length, so that a mask's place depends on no length of the step. Shapes of one
    builder share memory, as their other inputs do: each build writes it before its replay.

    Args:
        key: The shape; its queries have one length.
        max_seq_len: The longest sequence of a replay.
        others: The builder's masks in other shapes.
        device: Where it is.
    """

    def __init__(self, key: GraphShape, max_seq_len: int, others: Iterable[GraphMask], device: torch.device) -> None:
        size = key.num_tokens * max_seq_len
        shared = next((mask.memory for mask in others if mask.memory.numel() >= size), None)
        self.memory: Tensor = torch.zeros(size, dtype=torch.bool, device=device) if shared is None else shared
        self._mask = self.memory[:size].view(key.num_reqs, key.query_len or 1, max_seq_len)
        self._positions = torch.arange(max_seq_len, device=device)

    def write(self, ragged: Tensor, query_start_loc: Tensor, seq_lens: Tensor, num_reqs: int) -> Tensor:
        """
        Write a step's mask, and return it as the graph reads it. Nothing waits for the device.

        Columns beyond a request's sequence, and all of a padded request, are False.

        Args:
            ragged: ``(sum(query_len * seq_len),)`` bool, the requests' masks one after another (`Batch.custom_mask`).
            query_start_loc: ``(num_reqs + 1,)``, as the graph reads it.
            seq_lens: ``(num_reqs,)``, as the graph reads them: a padded request has no query or no key.
            num_reqs: Requests before the padding that a host counts; whatever those behind them hold is no mask.
        """
        lens = seq_lens * (query_start_loc.diff() > 0)
        inside = (self._positions < lens.unsqueeze(1)).unsqueeze(1)
        inside[num_reqs:] = False
        # True places are filled in memory order, which is that of the ragged mask: requests, then queries, then keys.
        return self._mask.zero_().masked_scatter_(inside, ragged)
