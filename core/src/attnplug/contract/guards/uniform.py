"""Recognises batches whose requests have equally many query tokens by one comparison: the usual decode step."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch

_KEPT: Final = 512
"""Shapes whose tensors are kept, of four bytes per request each."""


def uniform_query_lens(batch: Batch) -> Tensor | None:
    """
    Return the query lengths if all of them are `max_query_len`, else None. The batch need not have been checked.

    Args:
        batch: A batch, with or without a host copy of `query_start_loc`.

    Returns:
        ``(num_reqs,)`` int32 on the CPU, kept from step to step: nobody writes into it.
    """
    num_reqs, query_len, tokens = batch.num_reqs, batch.max_query_len, batch.num_actual_tokens
    if not type(num_reqs) is type(query_len) is type(tokens) is int or num_reqs < 1 or query_len < 1:
        return None
    host = batch.query_start_loc_cpu
    if host is None or not host.is_cpu or host.dtype != torch.int32 or host.shape != (num_reqs + 1,):
        return None
    if num_reqs * query_len != tokens:
        return None
    starts, lens = _of_shape(num_reqs, query_len)
    if type(starts) is not torch.Tensor:  # in a mode that fakes tensors: no later batch is compared with those
        _of_shape.cache_clear()
        return None
    return lens if torch.equal(host, starts) else None


@lru_cache(_KEPT)
def _of_shape(num_reqs: int, query_len: int) -> tuple[Tensor, Tensor]:
    """Return where such queries start, and their lengths."""
    starts = torch.arange(0, num_reqs * query_len + 1, query_len, dtype=torch.int32, device="cpu")
    return starts, torch.full((num_reqs,), query_len, dtype=torch.int32, device="cpu")
