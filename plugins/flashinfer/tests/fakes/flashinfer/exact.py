"""The attention of one request in float64, base-2 LSE included."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

_HIDDEN = 5e4
"""Hidden keys have this score, negative and not scaled: ``inf`` in the library's ``math.cuh``."""

_TILE = 16


@frozen
class ScoreParams:
    """
    The parameters of the scores.

    Attributes:
        scale: The softmax scale.
        soft_cap: Scores become ``cap * tanh(score / cap)``; 0 means no cap.
        window_left: The window to the left, without the token itself; -1 means all positions.
        causal: Whether a causal mask applies.
    """

    scale: float
    soft_cap: float
    window_left: int
    causal: bool


def attend(
    query: Tensor, key: Tensor, value: Tensor, params: ScoreParams, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Return the output and the base-2 LSE of a request whose queries are the last of its tokens, both in float64.

    Args:
        query: ``(queries, num_qo_heads, head_size)``.
        key: ``(keys, num_kv_heads, head_size)``.
        value: ``(keys, num_kv_heads, head_size_v)``.
        params: The parameters of the scores.
        sink: ``(num_qo_heads,)`` logits in the denominator of the softmax, and in the LSE.
    """
    group = query.shape[1] // key.shape[1]
    keys = key.double().repeat_interleave(group, 1)
    values = value.double().repeat_interleave(group, 1)
    scores = params.scale * torch.einsum("qhd,khd->hqk", query.double(), keys)
    hidden = -_HIDDEN * params.scale
    if params.soft_cap > 0:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        hidden = -_HIDDEN * params.soft_cap
    visible = _visible(query.shape[0], key.shape[0], params)
    scores = scores.masked_fill(~visible, hidden)
    # The last tile has hidden keys besides, of value 0. Rows that see nothing are left out by the kernels.
    scores = torch.nn.functional.pad(scores, (0, _TILE), value=hidden)
    scores = scores.masked_fill(~visible.any(-1)[:, None], -torch.inf)
    values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, _TILE))
    lse = _logsumexp(scores)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None])
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[:, :, None])
    output = torch.einsum("hqk,khd->qhd", weights, values)
    return output, lse.T / math.log(2.0)


def _visible(queries: int, keys: int, params: ScoreParams) -> Tensor:
    """Return the mask ``(queries, keys)``."""
    position = torch.arange(queries)[:, None] + keys - queries
    other = torch.arange(keys)[None, :]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if params.causal:
        visible &= other <= position
    if params.window_left >= 0:
        visible &= other >= position - params.window_left
    return visible


def _logsumexp(scores: Tensor) -> Tensor:
    """Return -inf for rows without keys, for which torch raises an error."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    return torch.logsumexp(scores, -1)
