"""
The same call as engines pass it: with upper bounds for its counts, with requests that are padding, with lengths that
the CPU does not know, and with rows that are parts of wider tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from attrs import evolve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug.contract import Batch
    from attnplug_kit.oracle.scene import Dense

_D = TypeVar("_D", bound="Dense")
NO_BLOCK: Final = 10**6
"""Numbers of blocks from here on are of none: entries of block tables that may not be read have such."""

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


def with_inexact_lens(batch: Batch, kind: str, more: int = 3) -> Batch:
    """Return the batch with what the CPU has of the lengths: bounds that are larger by `more`, or nothing."""
    exact = batch.seq_lens_cpu
    bound = None if kind == "absent" or exact is None else exact + more
    unknown: dict[str, Any] = {"key_start_loc_cpu": None} if batch.key_start_loc is not None else {}
    inexact = evolve(batch, seq_lens_cpu=bound, max_seq_len=batch.max_seq_len + more, **unknown)
    return inexact if batch.block_table is None else with_wider_table(inexact)  # as wide as the bound needs


def with_strides(call: _D, strides: str) -> _D:
    """
    Return the call with rows that are parts of wider ones: the contract has a contiguous last axis only.

    Args:
        call: The call.
        strides: As of `Case`.
    """
    if strides == "packed":
        return call
    changed: dict[str, Any] = {name: _in_wider_rows(getattr(call, name)) for name in ("output", "lse")}
    for name, spaced in zip(("query", "key", "value"), _SPACED[strides], strict=True):
        rows: Tensor | None = getattr(call, name)
        changed[name] = None if rows is None else spaced(rows)
    for name, rows in call.selection.items():
        if name == "indices":
            changed[name] = torch.cat([rows * 0, rows, rows * 0], 1)[:, rows.shape[1] : 2 * rows.shape[1]]
    if call.batch.block_table is not None:
        changed["batch"] = with_wider_table(call.batch)
    return evolve(call, **changed)


def with_wider_table(batch: Batch) -> Batch:
    """Return the batch with a block table as wide as an engine's, whose further entries name no block."""
    table: Tensor = batch.block_table  # type: ignore[assignment] # of a paged batch
    missing = torch.full_like(table, int(table.max()) + NO_BLOCK if table.numel() else 0)
    wide = torch.cat([table, missing, missing[:, :1], missing[:, :1], missing[:, :1]], 1)
    return evolve(batch, block_table=wide, block_table_cpu=wide if wide.device.type == "cpu" else None)


def _in_wider_rows(rows: Tensor) -> Tensor:
    flat = rows.flatten(1)
    wide = torch.cat([_nan(flat), flat, flat], 1)
    return wide[:, flat.shape[1] : 2 * flat.shape[1]].view(rows.shape)


def _in_far_rows(rows: Tensor) -> Tensor:
    """Return rows as far apart as those of one part of a large fused projection."""
    flat = rows.flatten(1)
    return torch.cat([flat, *[_nan(flat)] * 8], 1)[:, : flat.shape[1]].view(rows.shape)


def _heads_first(rows: Tensor) -> Tensor:
    """Return ``(tokens, heads, size)`` with the heads before the tokens in memory."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _in_wider_heads(rows: Tensor) -> Tensor:
    """Return ``(tokens, heads, size)`` in memory where each head has as much again behind it, as ``[q0 k0 q1 k1]``."""
    return torch.cat([rows, _nan(rows)], 2)[:, :, : rows.shape[2]]


def _nan(rows: Tensor) -> Tensor:
    """Return rows like these that nothing may read: bytes of narrow floats have no `full_like`."""
    if rows.itemsize == 1:
        return torch.full_like(rows.view(torch.uint8), 0xFF).view(rows.dtype)
    return torch.full_like(rows, torch.nan)


_SPACED: Final[Mapping[str, tuple[Callable[[Tensor], Tensor], ...]]] = {
    "rows": (_in_wider_rows,) * 3,
    "heads": (_in_wider_heads,) * 3,
    "values": (_as_they_are, _as_they_are, _in_wider_rows),
    "keys": (_in_far_rows, _in_wider_heads, _as_they_are),
    "heads first": (_heads_first, _as_they_are, _as_they_are),
}
"""Where queries, keys and values are, by the name that `Case.strides` has for it."""
