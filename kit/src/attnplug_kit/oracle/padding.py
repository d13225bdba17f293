"""The same batch as engines pad it: with upper bounds for its counts, and with requests that are padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import Batch

_LENGTHS: Final = ("seq_lens", "encoder_seq_lens", "dcp_local_seq_lens", "num_computed_tokens")


def with_bounds(batch: Batch, more: int = 1) -> Batch:
    """Return the batch with counts that are that much larger; its calls need as many rows more."""
    names = ("num_actual_tokens", "max_query_len", "max_seq_len")
    return evolve(batch, **{name: getattr(batch, name) + more for name in names})


def with_padded_requests(batch: Batch) -> Batch:
    """
    Return the batch with two padded requests: one repeats the first, with a row and the null block's slot, and the
    other has no query.

    A call needs a row more: the batch's slot mapping has one already, for padding.
    """
    fields: dict[str, Any] = {"num_reqs": batch.num_reqs + 2, "num_padded_reqs": 2}
    for suffix in ("", "_cpu"):
        starts: Tensor = getattr(batch, f"query_start_loc{suffix}")
        fields[f"query_start_loc{suffix}"] = torch.cat([starts, starts[-1:] + 1, starts[-1:] + 1])
        for name in _LENGTHS:
            lens: Tensor | None = getattr(batch, f"{name}{suffix}", None)
            if lens is not None:
                fields[f"{name}{suffix}"] = torch.cat([lens, lens[:1], lens[:1] * 0])
        table: Tensor | None = getattr(batch, f"block_table{suffix}")
        if table is not None:
            fields[f"block_table{suffix}"] = torch.cat([table, table[:1], table[:1] * 0])
        keys: Tensor | None = getattr(batch, f"key_start_loc{suffix}")
        if keys is not None:
            fields[f"key_start_loc{suffix}"] = torch.cat([keys, keys[-1:], keys[-1:]])
        slots: Tensor | None = getattr(batch, f"slot_mapping{suffix}")
        tokens = batch.num_actual_tokens
        if slots is not None and batch.encoder_seq_lens is None:
            fields[f"slot_mapping{suffix}"] = torch.cat([slots[:tokens], slots[:1] * 0, slots[tokens + 1 :]])
    return evolve(batch, **fields, num_actual_tokens=batch.num_actual_tokens + 1)
