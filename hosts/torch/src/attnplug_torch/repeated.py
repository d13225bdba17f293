"""
Calls of `scaled_dot_product_attention` without a mask, which models repeat: what each kind runs on is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch
from attrs import define

from attnplug.dense import DecisionCache, PreparedAttention, prepare_attention, rows_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

_MOST: Final = 32
"""Kinds of calls that a thread keeps: as many as core keeps the metadata of."""


@define(eq=False)
class RepeatedCall:
    """
    What calls of one kind run on: one for all tensors of the same shapes, strides, dtypes and device.

    Attributes:
        prepared: What computes them.
        keys: How many keys are attended to: with causal queries that begin at the first key, as many as queries.
        rows: Shape and strides in which a backend takes query, key and value: ``(batch * tokens, heads, size)``. None
            where a copy is needed.
        shape: Of the output, ``(batch, heads, queries, size)``.
        strides: Of the memory that a backend has written, seen in this shape.
        is_in_place: Whether these are the strides that torch's operators return.
        is_checked: Whether a call of the kind has run, so that the tensors of others need no checks.
    """

    prepared: PreparedAttention
    keys: int
    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_in_place: bool
    is_checked: bool = False

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[str, Tensor, Tensor]:
        """Return the candidate that ran, the output, and the LSE ``(batch, heads, queries)`` with heads innermost."""
        of_query, of_key, of_value = self.rows
        output, lse = self.prepared.run(
            query.as_strided(*of_query) if of_query else _copied_rows(query, self.shape[2]),
            key.as_strided(*of_key) if of_key else _copied_rows(key, self.keys),
            value.as_strided(*of_value) if of_value else _copied_rows(value, self.keys),
            is_checked=self.is_checked,
        )
        self.is_checked = True
        batch, heads, queries, _ = self.shape
        seen = output.as_strided(self.shape, self.strides)
        if not self.is_in_place:
            seen = torch.empty_like(query).copy_(seen)
        requested = cast("Tensor", lse)
        return self.prepared.id, seen, requested.as_strided((batch, heads, queries), (queries * heads, 1, heads))


_calls: Final[DecisionCache[RepeatedCall | str]] = DecisionCache(_MOST, per_thread=True)


def kind_of(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, *, is_causal: bool, ends_together: bool
) -> Hashable:
    """Return what is equal for calls of one kind, in one thread."""
    tensors = (
        query.shape, query.stride(), query.dtype,
        key.shape, key.stride(), key.dtype, key.device,
        value.shape, value.stride(), value.dtype, value.device,
    )  # fmt: skip
    return _calls.key((tensors, is_causal, ends_together, scale), query.device)


def find(kind: Hashable) -> RepeatedCall | str | None:
    """Return what calls of this kind run on, or why torch's own operator serves them; None for none in this thread."""
    return _calls.find(kind)


def leave(kind: Hashable, reason: str) -> None:
    """Keep why torch's own operator serves calls of a kind."""
    _calls.keep(kind, reason)


def make(
    kind: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    *,
    is_causal: bool,
    ends_together: bool,
) -> RepeatedCall:
    """
    Decide a call, and keep what calls of its kind run on.

    Args:
        kind: What `kind_of` returns.
        query: ``(batch, heads, queries, size)``.
        key: ``(batch, kv_heads, keys, size)``.
        value: As `key`.
        scale: Factor of the scores.
        is_causal: Whether a query attends to no later key.
        ends_together: Whether the last causal query is at the last key; otherwise the first is at the first.

    Raises:
        TensorError: As for `attnplug.dense.prepare_attention`, and so are the others.
        RequirementsError: Likewise.
        NoBackendError: Likewise.
        NotNegotiatedError: Likewise.
    """
    batch, heads, queries, size = query.shape
    keys = queries if is_causal and not ends_together else key.shape[2]
    tokens_first = [query.transpose(1, 2), *(one.transpose(1, 2)[:, :keys] for one in (key, value))]
    prepared = prepare_attention(*tokens_first, causal=is_causal, scale=scale, return_lse=True)
    strides = (queries * heads * size, size, heads * size, 1)
    made = RepeatedCall(
        prepared=prepared,
        keys=keys,
        rows=tuple(map(rows_of, tokens_first)),
        shape=(batch, heads, queries, size),
        strides=strides,
        is_in_place=strides == query.stride(),
    )
    _calls.keep(kind, made)
    return made


def _copied_rows(tensor: Tensor, tokens: int) -> Tensor:
    """Return ``(batch * tokens, heads, size)`` of the first tokens of ``(batch, heads, tokens, size)``."""
    first = tensor.transpose(1, 2)[:, :tokens]
    return (first if first.stride(-1) == 1 else first.contiguous()).flatten(0, 1)
